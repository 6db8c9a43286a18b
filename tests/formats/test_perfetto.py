"""Perfetto traces, read back with Perfetto's own protobuf classes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from prismscale.errors import StorageError
from prismscale.formats.perfetto import write_perfetto
from prismscale.formats.perfetto_counters import StepCurve
from prismscale.sim.timeline import Timeline, simulate
from support.jobs import RecordedDurations, pipeline_job
from support.report_job import report_job
from support.strategies import Job, jobs


@dataclass(kw_only=True)
class Slice:
    """One slice as a viewer shows it."""

    process: str
    thread: str
    track: int
    category: str
    name: str
    start: int
    end: int
    flows: list[int]
    args: dict[str, str | int]


def read_slices(path: Path) -> list[Slice]:
    """All slices, begin and end matched per track in file order as a stable sort would."""
    trace = Trace.FromString(path.read_bytes())
    processes, threads, slices = {}, {}, []
    open_slices: dict[int, list[Slice]] = defaultdict(list)
    for packet in trace.packet:
        descriptor, event = packet.track_descriptor, packet.track_event
        if descriptor.HasField("process"):
            processes[descriptor.process.pid] = descriptor.process.process_name
        if descriptor.HasField("thread"):
            threads[descriptor.uuid] = (processes[descriptor.thread.pid], descriptor.thread)
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            process, thread = threads[event.track_uuid]
            begun = Slice(
                process=process,
                thread=thread.thread_name,
                track=event.track_uuid,
                category=event.categories[0],
                name=event.name,
                start=packet.timestamp,
                end=-1,
                flows=list(event.flow_ids),
                args={a.name: a.string_value or a.int_value for a in event.debug_annotations},
            )
            open_slices[event.track_uuid].append(begun)
        if event.type == TrackEvent.TYPE_SLICE_END:
            closed = open_slices[event.track_uuid].pop()
            closed.end = packet.timestamp
            slices.append(closed)
    assert not any(open_slices.values())
    return slices


def notes(path: Path) -> list[str]:
    """Names of the instant events."""
    packets = Trace.FromString(path.read_bytes()).packet
    return [p.track_event.name for p in packets if p.track_event.type == TrackEvent.TYPE_INSTANT]


@pytest.fixture
def timeline() -> Timeline:
    """Two steps of a small pipeline; ranks 0, 1 (its tensor peer) and 4 (the next stage) kept."""
    graph = pipeline_job(2, 2, 2, 2)
    return simulate(graph, RecordedDurations(graph), steps=2, ranks=[0, 1, 4])


def test_every_node_is_there_at_its_time(timeline: Timeline, tmp_path: Path) -> None:
    """Slices other than waiting are the nodes of the kept ranks, to the nanosecond."""
    write_perfetto(tmp_path / "t", {"predicted": timeline})

    found = sorted((s.start, s.end) for s in read_slices(tmp_path / "t") if s.category != "waiting")

    expected = [
        pair
        for kept in timeline.ranks.values()
        for pair in zip(kept.ready_ns_N.tolist(), kept.end_ns_N.tolist(), strict=True)
    ]
    assert sorted(expected) == found


def test_ranks_are_named_by_their_place(timeline: Timeline, tmp_path: Path) -> None:
    """A process says the rank and its position on each mesh axis."""
    write_perfetto(tmp_path / "t", {"predicted": timeline})

    assert {s.process for s in read_slices(tmp_path / "t")} == {
        "rank 0 (tp 0, dp 0, pp 0)",
        "rank 1 (tp 1, dp 0, pp 0)",
        "rank 4 (tp 0, dp 0, pp 1)",
    }


def test_timelines_stand_side_by_side(timeline: Timeline, tmp_path: Path) -> None:
    """With several timelines each rank shows one process for each, with its title."""
    write_perfetto(tmp_path / "t", {"predicted": timeline, "observed": timeline})

    shown = [s.process.partition(" (")[0] for s in read_slices(tmp_path / "t")]
    processes = list(dict.fromkeys(shown))

    assert processes[:2] == ["predicted: rank 0", "observed: rank 0"]
    assert len(processes) == 6


def test_waiting_comes_before_the_communication(timeline: Timeline, tmp_path: Path) -> None:
    """A receive that waits for its pipeline stage is a waiting slice, then its own 3,000 ns."""
    write_perfetto(tmp_path / "t", {"predicted": timeline})
    second_stage = [s for s in read_slices(tmp_path / "t") if s.process.startswith("rank 4")]

    waits, receives = (
        [s for s in second_stage if s.name == name] for name in ("wait: recv", "recv")
    )

    assert (waits[0].start, waits[0].end) == (50, receives[0].start)
    assert receives[0].end - receives[0].start == 3_000


def test_arguments_say_what_moves_and_where(timeline: Timeline, tmp_path: Path) -> None:
    """A communication shows bytes, group, call site, peer, and whatever the caller adds."""
    write_perfetto(
        tmp_path / "t", {"p": timeline}, annotate=lambda _, node: {"source": f"modelled {node}"}
    )

    send = next(s for s in read_slices(tmp_path / "t") if s.name == "send")

    assert send.args["bytes"] == 10_000
    assert send.args["group"] == "pp"
    assert send.args["peer rank"] == 4
    assert send.args["call site"] == "train.py:35"
    assert send.args["source"] == f"modelled {send.args['node']}"


@given(job=jobs(max_ranks=8))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_arrows_join_slices_of_one_communication(job: Job, tmp_path: Path) -> None:
    """Slices that share an arrow belong to different ranks and begin and end together; slices of
    one thread never overlap."""
    graph = job.graph
    timeline = simulate(
        graph, RecordedDurations(graph), steps=2, ranks=range(graph.world_size), with_prologue=True
    )
    write_perfetto(tmp_path / "t", {"p": timeline})

    by_flow, by_track = defaultdict(list), defaultdict(list)
    for s in read_slices(tmp_path / "t"):
        by_track[s.track].append(s)
        for flow in s.flows:
            by_flow[flow].append(s)
    for joined in by_flow.values():
        assert len({(s.start, s.end) for s in joined}) == 1
        assert len({s.process for s in joined}) == len(joined) > 1
    for track in by_track.values():
        assert all(a.end <= b.start for a, b in itertools.pairwise(track))


def test_send_and_receive_share_an_arrow(timeline: Timeline, tmp_path: Path) -> None:
    """An arrow leads from the first stage's send to the second stage's receive."""
    write_perfetto(tmp_path / "t", {"p": timeline})

    slices = read_slices(tmp_path / "t")

    send = next(s for s in slices if s.name == "send" and s.process.startswith("rank 0"))
    ends = {(s.name, s.process) for s in slices if s.flows == send.flows}
    assert ends == {("send", send.process), ("recv", "rank 4 (tp 0, dp 0, pp 1)")}


def test_bounded_trace_says_what_it_lacks(timeline: Timeline, tmp_path: Path) -> None:
    """A trace over the limit begins at one time for all ranks, and says so twice."""
    whole = write_perfetto(tmp_path / "whole", {"p": timeline})
    part = write_perfetto(tmp_path / "part", {"p": timeline}, max_slices=40)

    assert whole.left_out == 0
    assert part.slices <= 40
    assert part.slices + part.left_out == whole.slices
    assert all(s.start > part.after_ns for s in read_slices(tmp_path / "part"))
    assert notes(tmp_path / "whole") == []
    assert notes(tmp_path / "part") == [part.sentence()]


def test_observed_timeline_without_last_arrivals(timeline: Timeline, tmp_path: Path) -> None:
    """Where only arrivals and ends are known, a communication is one slice from arrival to end."""
    ranks = {rank: replace(kept, ready_ns_N=None) for rank, kept in timeline.ranks.items()}

    write_perfetto(tmp_path / "t", {"observed": replace(timeline, ranks=ranks)})

    assert {s.category for s in read_slices(tmp_path / "t")} == {"computation", "communication"}


def test_trace_that_cannot_be_written(timeline: Timeline, tmp_path: Path) -> None:
    """A bad path is a StorageError."""
    (tmp_path / "file").write_text("")

    with pytest.raises(StorageError, match="a part of that path is a file"):
        write_perfetto(tmp_path / "file" / "t", {"p": timeline})


def curves(path: Path) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """(time, value) of each counter, by process and name."""
    trace = Trace.FromString(path.read_bytes())
    processes: dict[int, str] = {}
    names: dict[int, tuple[str, str]] = {}
    found: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for packet in trace.packet:
        descriptor, event = packet.track_descriptor, packet.track_event
        if descriptor.HasField("process"):
            processes[descriptor.uuid] = descriptor.process.process_name
        if descriptor.HasField("counter"):
            names[descriptor.uuid] = (processes[descriptor.parent_uuid], descriptor.name)
        if event.type == TrackEvent.TYPE_COUNTER:
            found[names[event.track_uuid]].append((packet.timestamp, event.counter_value))
    return found


def test_microbatches_in_flight_are_counted(tmp_path: Path) -> None:
    """In 1F1B as many as there are stages from a rank's own to the last; none in the end."""
    graph = report_job(pp=4, dp=2, microbatches=6)
    durations = RecordedDurations(graph)
    shown = {stage: stage * 2 for stage in range(4)}
    timeline = simulate(graph, durations, steps=2, ranks=list(shown.values()))
    write_perfetto(tmp_path / "t.perfetto-trace", {"predicted": timeline})

    found = curves(tmp_path / "t.perfetto-trace")
    for stage, rank in shown.items():
        (values,) = (
            [value for _, value in points]
            for (process, name), points in found.items()
            if process.startswith(f"rank {rank} ") and name == "microbatches in flight"
        )
        assert max(values) == 4 - stage
        assert values[-1] == 0
        assert len(values) == 2 * 2 * 6  # steps, ends of a microbatch, microbatches


def test_curves_of_a_step_are_drawn_in_each(timeline: Timeline, tmp_path: Path) -> None:
    """From its beginning; what lies beyond its end is left out."""
    period = int(np.diff(timeline.step_end_ns_TDR[:, 0, 0])[0])
    memory = StepCurve(
        name="memory",
        unit="B",
        time_ns_P=np.array([0, 5, 10 * period]),
        value_P=np.array([7, 9, 11]),
    )
    write_perfetto(tmp_path / "t.perfetto-trace", {"predicted": timeline}, curves={0: [memory]})

    found = curves(tmp_path / "t.perfetto-trace")
    ((_, points),) = ((key, p) for key, p in found.items() if key[1] == "memory")
    assert [value for _, value in points[:2]] == [7, 9]
    assert points[1][0] - points[0][0] == 5
    assert [value for _, value in points].count(7) == 2
