"""Writes traces of chosen ranks for ui.perfetto.dev, in Perfetto's own protobuf.

One process per rank, one thread per lane (more where nodes of a lane overlap). A communication is
two slices: waiting for the last member, and its own time. Arrows lead from each send to its
receive, and through the shown members of each collective. Curves show microbatches in flight, and
memory where it is known. Several timelines, for example predicted and observed, stand side by side,
rank by rank. Times are nanoseconds.

Format: https://perfetto.dev/docs/reference/synthetic-track-event
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)
from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

from prismscale.files import atomic_write
from prismscale.formats.perfetto_counters import Curve, StepCurve, in_flight, step_starts
from prismscale.graph.channels import ChannelKey, ClassChannels
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.node import NodeKind
from prismscale.sim.timeline import RankTimeline, Timeline

Args = Mapping[str, str | int]
Annotate = Callable[[RankClass, int], Args]
"""``(class, template node)`` → more arguments to show: algorithm, source of the duration, …"""

InstanceKey = tuple[str, ChannelKey, int, int]
"""(title of the timeline, channel, group of the family, index of this use of the channel)."""
NOTES_UUID = 1
SEQUENCE = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """How many slices a trace file holds, and how many were left out."""

    slices: int
    left_out: int
    """Slices that did not fit into ``max_slices``."""
    after_ns: int | None
    """If slices were left out, the file holds only those that begin after this time. Else None."""

    def sentence(self) -> str:
        """Return one line for the user that says what was left out."""
        if not self.left_out:
            return f"all {self.slices:,} slices"
        after = f"{(self.after_ns or 0) / 1e6:,.3f} ms"
        return f"{self.left_out:,} slices that begin at {after} or earlier were left out"


def write_perfetto(
    path: Path,
    timelines: Mapping[str, Timeline],
    *,
    max_slices: int = 200_000,
    annotate: Annotate | None = None,
    curves: Mapping[int, Sequence[StepCurve]] | None = None,
) -> Written:
    """Write the kept ranks of ``timelines`` (by title) to ``path``.

    Args:
        path: usually ``….perfetto-trace``; about 100 bytes a slice.
        timelines: by title; titles are shown if there are several.
        max_slices: if more would be needed, the trace begins later, at the same time for all ranks:
            reports show the last steps.
        annotate: gives further arguments of a node.
        curves: curves over one step, by rank; drawn in each step of that rank.

    Returns:
        What was written and what was left out; the trace says the same in its first track.

    Raises:
        StorageError: the file cannot be written; nothing is left half-written.
    """
    rows = [
        _Row(title=title, timeline=timeline, kept=kept)
        for title, timeline in timelines.items()
        for kept in timeline.ranks.values()
    ]
    rows.sort(key=lambda row: row.kept.rank)
    after_ns, total = _window(rows, max_slices)
    with atomic_write(path) as file:
        writer = _Writer(file, _flows(rows), annotate)
        for pid, row in enumerate(rows, start=1):
            writer.rank(row, pid, after_ns, titled=len(timelines) > 1)
            for curve in row.curves((curves or {}).get(row.kept.rank, ())):
                writer.curve(curve, pid, after_ns)
        written = Written(slices=writer.slices, left_out=total - writer.slices, after_ns=after_ns)
        writer.note(written)
    return written


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One rank of one timeline."""

    title: str
    timeline: Timeline
    kept: RankTimeline

    @property
    def rank_class(self) -> RankClass:
        return self.timeline.graph.classes[self.kept.class_index]

    def curves(self, of_step: Sequence[StepCurve]) -> Iterator[Curve]:
        """Yield the curves that are drawn beside the slices."""
        trace = self.rank_class.trace
        flying = in_flight(trace, self.kept)
        if flying is not None:
            yield flying
        starts = step_starts(trace, self.kept) if of_step else []
        yield from (curve.over(starts) for curve in of_step)

    def ready_times(self) -> NDArray[np.int64]:
        ready = self.kept.ready_ns_N
        return self.kept.start_ns_N if ready is None else ready

    def nodes(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (stream position, template node, start, last arrival, end) in stream order."""
        kept, trace = self.kept, self.rank_class.trace
        times = (kept.start_ns_N.tolist(), self.ready_times().tolist(), kept.end_ns_N.tolist())
        for x, *row in zip(itertools.count(kept.first_position), *times, strict=False):
            yield (x, trace.template(x), *row)

    def instances(self) -> Iterator[tuple[int, InstanceKey]]:
        """Yield (stream position, identity) of every communication."""
        graph, rank_class = self.timeline.graph, self.rank_class
        trace = rank_class.trace
        member = int(graph.member_of_R[self.kept.rank])
        used = ClassChannels(graph, rank_class)
        channels = {
            i: (used.of(i), rank_class.slots[int(trace.group_index_N[i])])
            for i in trace.communications(0, trace.n_nodes)
        }
        uses: Counter[ChannelKey] = Counter()
        stop = self.kept.first_position + len(self.kept.start_ns_N)
        for x in range(self.kept.first_position, stop):
            found = channels.get(trace.template(x))
            if found:
                channel, slot = found
                yield x, (self.title, channel, int(slot.group_M[member]), uses[channel])
                uses[channel] += 1


def _window(rows: list[_Row], max_slices: int) -> tuple[int | None, int]:
    """Return the time until which slices are left out (None: none are), and their total number."""
    begins = [np.zeros(0, dtype=np.int64)]
    for row in rows:
        start, ready = row.kept.start_ns_N, row.ready_times()
        begins += [start[ready > start], ready]
    begin = np.concatenate(begins)
    if len(begin) <= max_slices:
        return None, len(begin)
    last = len(begin) - max_slices - 1
    return int(np.partition(begin, last)[last]), len(begin)


def _flows(rows: Iterable[_Row]) -> dict[InstanceKey, int]:
    """Number the communications of which several members are shown."""
    shown: Counter[InstanceKey] = Counter()
    for row in rows:
        shown.update(key for _, key in row.instances())
    return {key: n for n, key in enumerate((k for k, c in shown.items() if c > 1), start=1)}


@dataclass(slots=True)
class _Lane:
    """The threads that show one lane. Slices of one thread never overlap."""

    name: str
    threads: list[tuple[int, int]] = field(default_factory=list)
    """(track uuid, end of the last slice) of each thread."""


class _Writer:
    """Writes packets, the slices of a track in order of time, because readers sort stably."""

    def __init__(
        self, file: BinaryIO, flows: Mapping[InstanceKey, int], annotate: Annotate | None
    ) -> None:
        self._builder = StreamingTraceProtoBuilder(file)
        self._flows = flows
        self._annotate = annotate
        self._uuids = itertools.count(NOTES_UUID + 1)
        self._processes: dict[int, int] = {}
        """Uuid of each process's track, by pid."""
        self.slices = 0

    def rank(self, row: _Row, pid: int, after_ns: int | None, *, titled: bool) -> None:
        """Write all nodes of one rank that begin after ``after_ns``."""
        name = describe_rank(row.timeline.graph, row.kept.rank)
        process = self._track()
        process.track_descriptor.process.pid = pid
        process.track_descriptor.process.process_name = f"{row.title}: {name}" if titled else name
        self._builder.write_packet(process)
        self._processes[pid] = process.track_descriptor.uuid
        trace = row.rank_class.trace
        lanes = [_Lane(lane) for lane in trace.lanes]
        arguments: dict[int, Args] = {}
        instances = dict(row.instances())
        limit = after_ns if after_ns is not None else -1
        for x, node, start, ready, end in sorted(row.nodes(), key=lambda n: n[2]):
            if ready <= limit:
                continue
            track = self._thread(lanes[int(trace.lane_N[node])], pid, start, end)
            label = trace.labels[int(trace.label_N[node])] or "computation"
            if node not in arguments:
                arguments[node] = self._args(row, node)
            # The prologue is step -1.
            args = {**arguments[node], "step": max(-1, (x - trace.n_prologue) // trace.n_body)}
            if ready > start > limit:
                self._slice(track, "waiting", f"wait: {label}", start, ready, args)
            category = "communication" if x in instances else "computation"
            flow = self._flows.get(instances[x]) if x in instances else None
            self._slice(track, category, label, ready, end, args, flow)

    def curve(self, curve: Curve, pid: int, after_ns: int | None) -> None:
        """Write a counter of one rank."""
        track = self._track()
        descriptor = track.track_descriptor
        descriptor.parent_uuid = self._processes[pid]
        descriptor.name = curve.name
        descriptor.counter.unit_name = curve.unit
        self._builder.write_packet(track)
        for time_ns, value in zip(curve.time_ns_P.tolist(), curve.value_P.tolist(), strict=True):
            if after_ns is not None and time_ns <= after_ns:
                continue
            packet = self._event(descriptor.uuid, TrackEvent.TYPE_COUNTER, time_ns)
            packet.track_event.counter_value = value
            self._builder.write_packet(packet)

    def note(self, written: Written) -> None:
        """Write into the trace what was left out of it."""
        packet = self._track(NOTES_UUID)
        packet.track_descriptor.name = "prismscale"
        self._builder.write_packet(packet)
        if written.left_out:
            event = self._event(NOTES_UUID, TrackEvent.TYPE_INSTANT, written.after_ns or 0)
            event.track_event.name = written.sentence()
            self._builder.write_packet(event)

    def _thread(self, lane: _Lane, pid: int, start: int, end: int) -> int:
        for n, (uuid, busy_until) in enumerate(lane.threads):
            if busy_until <= start:
                lane.threads[n] = (uuid, end)
                return uuid
        packet = self._track()
        uuid = packet.track_descriptor.uuid
        number = f" ({len(lane.threads) + 1})" if lane.threads else ""
        thread = packet.track_descriptor.thread
        # A thread whose id equals its process's id would be shown as the main thread.
        thread.pid, thread.tid, thread.thread_name = pid, 2**20 + uuid, lane.name + number
        self._builder.write_packet(packet)
        lane.threads.append((uuid, end))
        return int(uuid)

    def _slice(
        self,
        track: int,
        category: str,
        name: str,
        start: int,
        end: int,
        args: Args,
        flow: int | None = None,
    ) -> None:
        packet = self._event(track, TrackEvent.TYPE_SLICE_BEGIN, start)
        event = packet.track_event
        event.name = name
        event.categories.append(category)
        if flow is not None:
            event.flow_ids.append(flow)
        for key, value in args.items():
            annotation = event.debug_annotations.add(name=key)
            if isinstance(value, int):
                annotation.int_value = value
            else:
                annotation.string_value = value
        self._builder.write_packet(packet)
        self._builder.write_packet(self._event(track, TrackEvent.TYPE_SLICE_END, end))
        self.slices += 1

    def _args(self, row: _Row, node: int) -> Args:
        rank_class = row.rank_class
        trace = rank_class.trace
        args: dict[str, str | int] = {"node": node, "call site": trace.site(node)}
        if trace.kind_N[node] != NodeKind.COMPUTE:
            args |= _communication_args(row, node)
        return {**args, **self._annotate(rank_class, node)} if self._annotate else args

    def _event(self, track: int, kind: int, time_ns: int) -> TracePacket:
        packet = TracePacket(timestamp=time_ns, trusted_packet_sequence_id=SEQUENCE)
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet

    def _track(self, uuid: int | None = None) -> TracePacket:
        descriptor = TrackDescriptor(uuid=next(self._uuids) if uuid is None else uuid)
        return TracePacket(
            timestamp=0, trusted_packet_sequence_id=SEQUENCE, track_descriptor=descriptor
        )


def _communication_args(row: _Row, node: int) -> Args:
    graph, rank_class = row.timeline.graph, row.rank_class
    trace = rank_class.trace
    group_index = int(trace.group_index_N[node])
    slot, member = rank_class.slots[group_index], int(graph.member_of_R[row.kept.rank])
    ranks = graph.families[slot.family].ranks_KG[:, slot.group_M[member]]
    args: dict[str, str | int] = {
        "bytes": int(trace.bytes_N[node]),
        "group": trace.groups[group_index].name or f"group {group_index}",
        "group size": len(ranks),
    }
    if trace.kind_N[node] != NodeKind.COLLECTIVE:
        position = int(np.flatnonzero(ranks == row.kept.rank)[0])
        args["peer rank"] = int(ranks[(position + int(trace.peer_N[node])) % len(ranks)])
    return args


def describe_rank(graph: JobGraph, rank: int) -> str:
    """Return a rank and its place on each named mesh axis: ``rank 17 (tp 1, dp 0, pp 1)``."""
    rank_class = graph.classes[int(graph.class_of_R[rank])]
    member = int(graph.member_of_R[rank])
    places = []
    for group, slot in zip(rank_class.trace.groups, rank_class.slots, strict=True):
        is_axis = group.name and 1 < len(group.ranks) < graph.world_size
        if is_axis and group.within is None:
            position = int(slot.slot_M[member]) // graph.families[slot.family].n_groups
            places.append(f"{group.name} {position}")
    return f"rank {rank} ({', '.join(places)})" if places else f"rank {rank}"
