"""A training program on a device of logical time: recorded, and run live among virtual ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prismscale.capture.recorder import Recorder
from prismscale.cluster import Cluster
from prismscale.cost.collective import CollectiveModel, collective_model
from prismscale.devices.stream_device import StreamDevice
from prismscale.durations.faults import Faults
from prismscale.durations.graph_durations import GraphDurations
from prismscale.emulation.hook import Collective, CommunicationHook, GroupHandle
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import collect_groups
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import RankTrace
from prismscale.host_comm.local_work import NullLoad
from prismscale.live.coordinator.core import Coordinator
from prismscale.live.coordinator.wire import Wire
from prismscale.live.exchange import Exchange
from prismscale.live.hook_base import StepEnd
from prismscale.live.pacer.client import PacerLink
from prismscale.live.pacer.pacer_process import Pacer, SocketLink
from prismscale.live.pacer.shared_words import Point, SharedWords
from prismscale.live.stream_hook import StreamedHook
from prismscale.live.trace_cursor import TraceCursor
from prismscale.sim.program import compile_job
from prismscale.sim.timeline import simulate
from support.logical_streams import Event, LogicalStreams, Stream
from support.recorded_steps import recorded_trace_of

US, MS = 1_000, 1_000_000
WORLD = GroupHandle(group_index=0, ranks=(0, 1), group_rank=0, name="world", backend="nccl")
OTHER = GroupHandle(group_index=1, ranks=(0, 1), group_rank=0, name="other", backend="nccl")


class SlowPayload:
    """Filling outputs takes the device a while; notes where and when it happens."""

    def __init__(self, streams: LogicalStreams, duration_ns: int = 30 * US) -> None:
        self._streams = streams
        self._duration_ns = duration_ns
        self.began: list[tuple[Stream, Event]] = []

    def fill(self, collective: Collective) -> None:
        stream = self._streams.current()
        self.began.append((stream, self._streams.record(stream)))
        self._streams.work(self._duration_ns)


class Program:
    """What a training script does, on a hook."""

    def __init__(self, streams: LogicalStreams, hook: CommunicationHook) -> None:
        self.streams = streams
        self.work = streams.work
        self._hook = hook

    def communicate(
        self,
        op: CollectiveOp = CollectiveOp.ALL_REDUCE,
        *,
        group: GroupHandle = WORLD,
        n_bytes: int = 64 << 20,
        sync: bool = False,
    ) -> Any:
        tensors = (torch.empty(n_bytes, dtype=torch.uint8, device="meta"),)
        if op == CollectiveOp.BARRIER:
            tensors, n_bytes = (), 0
        batch = Collective(
            op=op,
            group=group,
            inputs=tensors,
            outputs=tensors,
            n_bytes=n_bytes,
            asynchronous=not sync,
        )
        return self._hook.communicate([batch])


@contextmanager
def recording(
    fill_ns: int = 30 * US,
) -> Iterator[tuple[Program, Recorder, StreamDevice, SlowPayload]]:
    """A program whose every move on a logical device is recorded."""
    streams = LogicalStreams()
    device = StreamDevice(streams, name="logical")
    payload = SlowPayload(streams, fill_ns)
    recorder = Recorder(device, payload)
    for group in (WORLD, OTHER):
        recorder.group_created(group.ranks, group.name, group.backend, group.group_index)
    with device.observed(recorder):
        recorder.resume()
        yield Program(streams, recorder), recorder, device, payload
        recorder.finish()


def spans(recorder: Recorder, device: StreamDevice) -> list[tuple[str, int]]:
    """Lane and duration of every computation that took time."""
    lanes = recorder.stream.lanes.all()
    found = [
        (lanes[n.lane], device.elapsed_ns(n.began, n.ended))
        for n in recorder.stream.nodes
        if n.kind == NodeKind.COMPUTE
    ]
    return [(lane, ns) for lane, ns in found if ns]


def ancestors(recorder: Recorder, position: int) -> set[int]:
    """All nodes that must be done before the one at ``position``."""
    nodes = recorder.stream.nodes
    found: set[int] = set()
    todo = list(nodes[position].preds)
    while todo:
        p = todo.pop()
        if p not in found:
            found.add(p)
            todo.extend(nodes[p].preds)
    return found


def communications(recorder: Recorder) -> list[int]:
    """Positions of communications."""
    return [i for i, n in enumerate(recorder.stream.nodes) if n.kind != NodeKind.COMPUTE]


class DrivenLink(PacerLink):
    """A link whose waits let logical time pass, instead of another process doing its part."""

    drive: Callable[[], None]

    def hear(self) -> dict[str, Any]:
        self.drive()
        return super().hear()

    def await_answer(self, gate: Point) -> None:
        while not self.is_answered(gate):
            self.drive()
        super().await_answer(gate)


class LiveRun:
    """A live rank 0 of 2 on logical streams: its real hook, pacer and coordinator in one thread."""

    def __init__(
        self, trace: RankTrace, tmp_path: Path, *, tick_ns: int = US, **options: Any
    ) -> None:
        self.tick_ns = tick_ns
        self.words = SharedWords(bytearray(3 * 1024 * 4))
        self.streams = LogicalStreams(self.words)
        self.streams.while_host_waits = self.drive
        rank_end, coordinator_end = socket.socketpair()
        self.wire = Wire(coordinator_end)
        ours, theirs = socket.socketpair()
        factor = options.get("compute_factor", 1.0)
        self.pacer = Pacer(
            words=self.words,
            link=SocketLink(theirs),
            wire=Wire(rank_end),
            origin_ns=0,
            compute_factor=factor,
        )
        link = DrivenLink(self.words, ours)
        link.drive = self.drive
        self.coordinator = coordinator_of(trace, options.pop("hang", {}))
        self.coordinator.join(0, self.wire)
        self.coordinator.go()
        self._wires = (rank_end, coordinator_end, ours, theirs)
        self.pacer.wire.receive(None)
        self.hook = StreamedHook(
            cursor=TraceCursor(trace),
            streams=self.streams,
            signals=self.streams,
            link=link,
            payload=SlowPayload(self.streams),
            exchange=Exchange(folder=tmp_path, rank=0, live=frozenset({0})),
            load=NullLoad(),
            **options,
        )
        for group in (WORLD, OTHER):
            self.hook.group_created(group.ranks, group.name, group.backend, group.group_index)

    def drive(self) -> None:
        """One moment: the device, the pacer and the coordinator each do what they can."""
        self.streams.advance_to(self.streams.now_ns + self.tick_ns)
        self.pacer.poll(self.streams.now_ns)
        for message in self.wire.receive(0.0) or ():
            self.coordinator.handle(0, message)

    def close(self) -> None:
        """No socket stays open."""
        self.hook.close()
        for connection in self._wires:
            connection.close()


def coordinator_of(trace: RankTrace, hang: dict[int, int]) -> Coordinator:
    """The real coordinator of two ranks that run ``trace``, rank 0 live."""
    representative_R = np.zeros(2, dtype=np.int64)
    traces = {0: trace}
    groups = collect_groups(traces, 2, representative_R)
    graph = assemble(traces, representative_R, groups, alone=(0,))
    durations = durations_of(graph, Faults(hang=hang))
    return Coordinator(compile_job(graph), durations, model(), [0])


def model() -> CollectiveModel:
    return collective_model(Cluster.load("h100-sxm"))


def durations_of(graph: JobGraph, faults: Faults | None = None) -> GraphDurations:
    return GraphDurations(graph=graph, model=model(), faults=faults or Faults())


def train(program: Program, listener: Any, steps: int) -> None:
    """Overlapped, exposed, and grouped communication, then the end of a step."""
    for _ in range(steps):
        program.work(2 * MS)
        first = program.communicate(n_bytes=256 << 20)
        program.work(MS // 2)
        second = program.communicate(group=OTHER)
        first.wait()
        program.work(MS)
        second.wait()
        program.communicate(n_bytes=8 << 20, sync=True)
        program.work(300 * US)
        listener()


def recorded_trace(body: Callable[[Program, Any, int], None] = train) -> RankTrace:
    """What capture makes of the program."""
    with recording() as (program, recorder, device, _):
        body(program, recorder.optimizer_ended, 4)
    return recorded_trace_of(recorder, device, rank=0, world_size=2)


@contextmanager
def live(trace: RankTrace, tmp_path: Path, **options: Any) -> Iterator[tuple[LiveRun, Program]]:
    """A live rank of the recorded program."""
    run = LiveRun(trace, tmp_path, **options)
    try:
        yield run, Program(run.streams, run.hook)
    finally:
        run.close()


def periods(steps: Sequence[StepEnd]) -> list[int]:
    """Time from step to step."""
    return np.diff([step.end_ns for step in steps]).tolist()


def simulated_step_ns(trace: RankTrace) -> int:
    """What the engine says of the same job."""
    representative_R = np.zeros(2, dtype=np.int64)
    groups = collect_groups({0: trace}, 2, representative_R)
    graph = assemble({0: trace}, representative_R, groups)
    return simulate(graph, durations_of(graph), steps=4).step_ns
