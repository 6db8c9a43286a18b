"""Recording and live ranks on a device with streams, without a GPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logical_streams import Event, LogicalStreams, Stream
from prismscale.capture.contention import NullLoad
from prismscale.capture.device import cuda
from prismscale.capture.device.cuda import CudaMemoryTracker, CudaStreams, require_cuda
from prismscale.capture.device.streams import MAX_OPEN_MARKS, EventTimes, StreamDevice
from prismscale.capture.environment import RankEnvironment
from prismscale.capture.hook import Collective, CommunicationHook, GroupHandle
from prismscale.capture.payload import MirrorPayload
from prismscale.capture.recorder import Recorder
from prismscale.capture.spec import CaptureSpec
from prismscale.cluster import Cluster
from prismscale.cost.collective import CollectiveModel, collective_model
from prismscale.cost.durations import Faults, GraphDurations
from prismscale.errors import StuckError, UsageError
from prismscale.graph.assemble import assemble
from prismscale.graph.groups import collect_groups
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import RankTrace
from prismscale.live.coordinator import Coordinator
from prismscale.live.counters import CounterTimes, Prefixes
from prismscale.live.exchange import Exchange
from prismscale.live.messages import Kind as Said
from prismscale.live.messages import Message, Wire
from prismscale.live.pacer import Pacer, SocketLink
from prismscale.live.pacer_link import PacerLink
from prismscale.live.position import TraceCursor
from prismscale.live.runner import StepEnd
from prismscale.live.signals import Kind, Point, Points, Record, Words
from prismscale.live.streamed import StreamedHook
from prismscale.sim.program import compile_job
from prismscale.sim.timeline import simulate

US, MS = 1_000, 1_000_000
WORLD = GroupHandle(role=0, ranks=(0, 1), group_rank=0, name="world", backend="nccl")
OTHER = GroupHandle(role=1, ranks=(0, 1), group_rank=0, name="other", backend="nccl")


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
        recorder.group_created(group.ranks, group.name, group.backend, group.role)
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


class TestRecording:
    def test_spans_last_what_the_device_took(self) -> None:
        """Each span is as long as the kernels in it; filling outputs is in none."""
        with recording() as (program, recorder, device, _):
            program.work(3 * MS)
            program.communicate(sync=True)
            program.work(2 * MS)
            work = program.communicate()
            program.work(5 * MS)
            work.wait()
            program.work(MS)
        assert [ns for _, ns in spans(recorder, device)] == [3 * MS, 2 * MS, 5 * MS, MS]

    def test_communication_overlaps_what_does_not_wait_for_it(self) -> None:
        """The computation between issue and wait is no successor of the communication."""
        with recording() as (program, recorder, _, _):
            program.work(MS)
            work = program.communicate()
            program.work(MS)
            work.wait()
            program.work(MS)
        nodes = recorder.stream.nodes
        (issued,) = communications(recorder)
        between, after = issued + 1, issued + 2
        assert nodes[issued].preds == (issued - 1,)
        assert issued not in ancestors(recorder, between)
        assert {issued, between} <= set(nodes[after].preds)

    def test_outputs_are_filled_on_a_stream_of_their_own_after_the_current_one(self) -> None:
        """The fill begins when the program's stream reaches the issue, and delays nobody."""
        with recording() as (program, _, _, payload):
            program.work(3 * MS)
            program.communicate()
            program.work(MS)
        ((stream, began),) = payload.began
        assert stream is not program.streams.home
        assert began.at_ns == 3 * MS
        assert program.streams.home.free_ns == 4 * MS

    def test_waiting_is_an_order_between_streams(self) -> None:
        """The program's stream goes on after the fill; the host's clock has not moved."""
        with recording(fill_ns=10 * MS) as (program, _, _, _):
            program.work(MS)
            program.communicate(sync=True)
            program.work(MS)
            assert program.streams.now_ns == 0
        assert program.streams.home.free_ns == 12 * MS

    def test_barrier_stops_the_host(self) -> None:
        """After a barrier the device has done all that was issued before it."""
        with recording() as (program, _, _, _):
            program.work(2 * MS)
            program.communicate(CollectiveOp.BARRIER, sync=True)
            assert program.streams.now_ns >= 2 * MS

    def test_groups_communicate_side_by_side_and_each_in_order(self) -> None:
        """Two batches of one group follow each other; another group's does not wait."""
        with recording(fill_ns=MS) as (program, _, _, payload):
            for group in (WORLD, WORLD, OTHER):
                program.communicate(group=group)
        assert [event.at_ns for _, event in payload.began] == [0, MS, 0]

    def test_edges_between_the_programs_own_streams_are_seen(self) -> None:
        """As FSDP2 unshards: copy in on one stream, gather on a second, use on the first."""
        with recording() as (program, recorder, device, _):
            streams = program.streams
            copy_in, gather = streams.create(), streams.create()
            program.work(MS)
            streams.program_waits(streams.program_records(), copy_in)
            with streams.on(copy_in):
                program.work(2 * MS)
            streams.program_waits(streams.program_records(copy_in), gather)
            with streams.on(gather):
                program.communicate(CollectiveOp.ALL_GATHER, sync=True)
                gathered = streams.program_records()
            program.work(4 * MS)
            streams.program_waits(gathered)
            program.work(8 * MS)
        assert [ns for _, ns in spans(recorder, device)] == [MS, 2 * MS, 4 * MS, 8 * MS]
        nodes = recorder.stream.nodes
        took = {device.elapsed_ns(n.began, n.ended): i for i, n in enumerate(nodes) if n.began}
        (issued,) = communications(recorder)
        assert took[2 * MS] in ancestors(recorder, issued)
        assert took[4 * MS] not in ancestors(recorder, issued)
        assert issued not in ancestors(recorder, took[4 * MS])
        assert issued in ancestors(recorder, took[8 * MS])

    def test_idle_side_stream_is_not_busy(self) -> None:
        """Between two visits a copy stream has no span, however long the host is elsewhere."""
        with recording() as (program, recorder, device, _):
            side = program.streams.create()
            for _ in range(2):
                with program.streams.on(side):
                    program.work(MS)
                program.streams.host_computes(50 * MS)
        lanes = [lane for lane, _ in spans(recorder, device)]
        assert lanes == ["stream 1", "stream 1", "stream 0"]
        assert spans(recorder, device)[:2] == [("stream 1", MS)] * 2

    def test_home_stream_waits_for_the_host_within_its_spans(self) -> None:
        """A step that is bound by the host takes the host's time."""
        with recording() as (program, recorder, device, _):
            program.work(MS)
            program.streams.host_computes(7 * MS)
            program.work(MS)
        assert spans(recorder, device) == [("stream 0", 8 * MS)]

    def test_events_are_let_go_while_the_program_runs(self) -> None:
        """A long run holds a bounded number of events, and its spans stay exact."""
        with recording(fill_ns=0) as (program, recorder, device, _):
            for _ in range(MAX_OPEN_MARKS):
                program.work(US)
                program.communicate(sync=True)
                program.streams.host_computes(2 * US)
            held = {n.began.event for n in recorder.stream.nodes if n.began} - {None}
            assert len(held) <= MAX_OPEN_MARKS
        assert {ns for _, ns in spans(recorder, device)} == {US, 2 * US}

    def test_tensors_are_held_until_somebody_waits(self) -> None:
        """An input that the program drops while its communication is in flight lives on."""
        with recording(fill_ns=MS) as (program, _, device, _):
            work = program.communicate()
            flight = device._communication._flights[-1]
            assert not flight.is_over
            work.wait()
            assert flight.is_over


@given(st.lists(st.integers(0, 2 * 10**9), min_size=1, max_size=30))
def test_event_times_add_up_over_any_distance(gaps: list[int]) -> None:
    """Times of events, with moving anchors, are the sums of the gaps between them."""
    streams = LogicalStreams()
    times = EventTimes(streams)
    events = [Event(int(at)) for at in np.cumsum(gaps)]
    assert [times.ns(e) for e in events] == [e.at_ns - events[0].at_ns for e in events]


class FakeEvent:
    """Has the methods of ``torch.cuda.Event`` that matter, on logical streams."""

    device: LogicalStreams

    def __init__(self, enable_timing: bool = False) -> None:
        self.inner = Event()

    def record(self, stream: Any = None) -> None:
        self.device._record(self.inner, stream)

    def wait(self, stream: Any = None) -> None:
        self.device.wait(stream, self.inner)

    def elapsed_time(self, other: FakeEvent) -> float:
        return self.device.elapsed_ns(self.inner, other.inner) / 1e6


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> LogicalStreams:
    """``torch.cuda`` with logical streams behind its own names."""
    device = LogicalStreams()
    monkeypatch.setattr(FakeEvent, "device", device, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", device.current)
    monkeypatch.setattr(torch.cuda, "set_stream", device._switch)
    return device


class Notes:
    """Keeps what it is told about streams."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def switched(self, before: Stream, after: Stream) -> None:
        self.told.append("switched")

    def recorded(self, event: object, stream: Stream) -> None:
        self.told.append("recorded")

    def waits(self, stream: Stream, event: object, order: Callable[[], None]) -> None:
        self.told.append("waits")
        order()


class TestCuda:
    def test_program_is_observed_and_we_are_not(self, fake_cuda: LogicalStreams) -> None:
        """The rebound methods tell of the program's calls only, and are put back."""
        streams, notes, side = CudaStreams(), Notes(), fake_cuda.create()
        with streams.observed(notes):
            with streams.use(side):
                streams.wait(fake_cuda.home, streams.record(side))
            event = torch.cuda.Event()
            event.record(side)
            event.wait(fake_cuda.home)
            torch.cuda.set_stream(side)
        event.record(side)
        assert notes.told == ["recorded", "waits", "switched"]

    def test_elapsed_time_is_in_nanoseconds(self, fake_cuda: LogicalStreams) -> None:
        """CUDA answers in milliseconds."""
        streams = CudaStreams()
        began = streams.record(fake_cuda.home)
        fake_cuda.work(1_234_567)
        assert streams.elapsed_ns(began, streams.record(fake_cuda.home)) == 1_234_567

    def test_torch_without_cuda_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The message names this torch and the way out."""
        monkeypatch.setattr(torch.version, "cuda", None)
        with pytest.raises(UsageError, match=r"CUDA build of torch.*--device cpu"):
            require_cuda()

    def test_machine_without_gpu_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The message names what is missing and the way out."""
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(UsageError, match=r"NVIDIA GPU.*--device cpu"):
            require_cuda()

    def test_context_gets_all_hardware_queues(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """CUDA starts with the most connections; the program still reads its own setting."""
        seen: list[str | None] = []
        monkeypatch.setattr(cuda, "require_cuda", lambda: None)
        monkeypatch.setenv(cuda.CONNECTIONS, "1")
        monkeypatch.setattr(torch.cuda, "init", lambda: seen.append(os.environ[cuda.CONNECTIONS]))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        cuda.start_cuda()
        assert seen == ["32"]
        assert os.environ[cuda.CONNECTIONS] == "1"

    def test_memory_is_what_torch_cuda_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Peaks by step and reserved bytes; resets are ours only where steps are told apart."""
        peaks, resets = iter([5, 9, 7]), []
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 20)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
        tracker = CudaMemoryTracker(per_step=True)
        tracker.start()
        tracker.step_ended()
        tracker.step_ended()
        record = tracker.stop()
        assert (record.peak_bytes, record.peak_step, record.reserved_bytes) == (9, 1, 20)
        assert record.step_peak_bytes == (5, 9, 7)
        assert len(resets) == 4

    def test_every_rank_sees_device_0(self) -> None:
        """One GPU serves any rank: a program picks its device by LOCAL_RANK."""
        shared = RankEnvironment(rank=5, world_size=16, shares_device=True).variables()
        assert (shared["LOCAL_RANK"], shared["LOCAL_WORLD_SIZE"], shared["RANK"]) == ("0", "8", "5")


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
        self.words = Words(bytearray(3 * 1024 * 4))
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
            self.hook.group_created(group.ranks, group.name, group.backend, group.role)

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
    return recorder.stream.to_trace(
        device,
        rank=0,
        world_size=2,
        groups=recorder.groups,
        known_groups=recorder.known_groups,
        period=1,
        samples=2,
        memory=None,
        meta={},
    )


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


class TestLive:
    def test_step_time_is_the_simulated_one(self, tmp_path: Path) -> None:
        """A live rank that computes as captured takes as long as the engine says."""
        trace = recorded_trace()
        with live(trace, tmp_path) as (run, program):
            train(program, run.hook.step_ended, 4)
            assert run.streams.now_ns == 0, "the host was blocked"
            steps = run.hook.finish()
        expected = simulated_step_ns(trace)
        assert expected > 3_800 * US
        assert periods(steps) == pytest.approx([expected] * 3, abs=8 * US)

    def test_late_pacer_costs_no_logical_time(self, tmp_path: Path) -> None:
        """What the pacer's own slowness adds is measured and taken out."""
        trace = recorded_trace()
        with live(trace, tmp_path, tick_ns=40 * US) as (run, program):
            train(program, run.hook.step_ended, 4)
            steps = run.hook.finish()
        assert np.mean(periods(steps)) == pytest.approx(simulated_step_ns(trace), abs=60 * US)
        assert steps[-1].lag_ns > 3 * 40 * US

    def test_barrier_returns_when_it_ends(self, tmp_path: Path) -> None:
        """The host is held until the device has done everything before the barrier."""

        def body(program: Program, step_ended: Any, steps: int) -> None:
            for _ in range(steps):
                program.work(2 * MS)
                program.communicate(CollectiveOp.BARRIER, sync=True)
                step_ended()

        with live(recorded_trace(body), tmp_path) as (run, program):
            body(program, run.hook.step_ended, 2)
            assert run.streams.now_ns > 4 * MS
            run.hook.finish()

    def test_arrivals_of_one_group_are_told_in_program_order(self, tmp_path: Path) -> None:
        """A collective on an idle stream does not overtake one of its group on a busy stream."""

        def body(program: Program, step_ended: Any, steps: int) -> None:
            side = program.streams.create()
            for _ in range(steps):
                program.work(2 * MS)
                first = program.communicate()
                with program.streams.on(side):
                    second = program.communicate(CollectiveOp.ALL_GATHER)
                first.wait()
                second.wait()
                step_ended()

        trace = recorded_trace(body)
        with live(trace, tmp_path) as (run, program):
            body(program, run.hook.step_ended, 4)
            steps = run.hook.finish()
        assert periods(steps) == pytest.approx([simulated_step_ns(trace)] * 3, abs=8 * US)

    def test_slow_rank_takes_longer_on_the_device(self, tmp_path: Path) -> None:
        """A factor on computation holds the program's stream for the rest of it."""
        trace = recorded_trace()
        with live(trace, tmp_path, compute_factor=1.5) as (run, program):
            train(program, run.hook.step_ended, 4)
            steps = run.hook.finish()
        assert min(periods(steps)) > simulated_step_ns(trace) + 1_500 * US

    def test_hang_is_raised_and_nothing_stays_held(self, tmp_path: Path) -> None:
        """When the job hangs the program hears of it at its next communication."""
        with live(recorded_trace(), tmp_path, hang={1: 0}) as (run, program):
            with pytest.raises(StuckError, match="rank"):
                train(program, run.streams.synchronize, 8)
            run.streams.synchronize()

    def test_other_live_ranks_contribute_through_host_memory(self, tmp_path: Path) -> None:
        """A collective with a live peer combines real values before its stream is let go."""
        trace = recorded_trace()
        with live(trace, tmp_path) as (run, _):
            run.hook.exchange = Exchange(folder=tmp_path, rank=0, live=frozenset({0, 1}))
            run.hook.payload = MirrorPayload()
            tensor = torch.ones(1 << 20)
            peer = Exchange(folder=tmp_path, rank=1, live=frozenset({0, 1}))
            batch = Collective(
                op=CollectiveOp.ALL_REDUCE,
                group=WORLD,
                inputs=(tensor,),
                outputs=(tensor,),
                n_bytes=tensor.nbytes,
            )
            run.hook.cursor = Anywhere()  # type: ignore[assignment]
            meeting = peer_meeting(batch)
            peer.offer(meeting, batch, [0])
            tensor.mul_(2)
            run.hook.communicate([batch])
            assert tensor.unique().tolist() == [3.0]
            assert run.words.gates.max() == 1


class Anywhere:
    """A program of one communication that the graph does not have."""

    def next_position(self, collective: Collective) -> None:
        return None


def peer_meeting(collective: Collective) -> str:
    """What rank 1 calls the first use of the world group."""
    from prismscale.live.exchange import Meetings

    meetings = Meetings()
    meetings.group_created(0, WORLD.ranks)
    return meetings.name(collective)


POINTS = st.builds(Point, st.integers(0, 1023), st.integers(0, 2**31 - 1))
RECORDS = st.builds(
    Record,
    st.sampled_from(Kind),
    at=POINTS,
    gate=POINTS,
    position=st.integers(0, 2**63),
    role=st.integers(0, 2**15 - 1),
    op=st.sampled_from(CollectiveOp).map(int),
    n_bytes=st.integers(0, 2**62),
)


class TestSignals:
    @given(st.permutations(range(1, 9)))
    def test_gate_opens_without_gaps(self, order: list[int]) -> None:
        """A later point opens a gate only when all earlier ones have."""
        words = Words(bytearray(3 * 1024 * 4))
        gates, passed = Prefixes(words.gates), set()
        for value in order:
            gates.pass_(Point(3, value))
            passed.add(value)
            assert words.gates[3] == next(n for n in range(9) if n + 1 not in passed)

    @given(st.lists(RECORDS))
    def test_records_survive_the_way(self, records: list[Record]) -> None:
        """What the rank packs the pacer unpacks."""
        assert Record.unpack(b"".join(r.pack() for r in records)) == records

    def test_time_of_a_counter_is_between_two_looks(self) -> None:
        """The middle of the interval in which it changed."""
        words = Words(bytearray(3 * 1024 * 4))
        times = CounterTimes(words)
        times.look(1000)
        words.counters[2] = 2
        times.look(1600)
        assert [times.at(Point(2, n)) for n in (1, 2, 3)] == [1300, 1300, None]

    def test_owner_keeps_its_word(self) -> None:
        """Points of one stream count up in one word, another stream has another."""
        points = Points()
        assert [points.next(o) for o in "aba"] == [Point(0, 1), Point(1, 1), Point(0, 2)]


@pytest.fixture
def pacer_process(tmp_path: Path) -> Iterator[tuple[PacerLink, Words, Wire]]:
    """A pacer as a live rank starts it, with the coordinator's end of its wire."""
    words = Words.create(tmp_path / "words")
    rank_end, coordinator_end = socket.socketpair()
    link = PacerLink.start(tmp_path / "words", words, Wire(rank_end), 0, 1.0)
    rank_end.close()
    yield link, words, Wire(coordinator_end)
    link.close()
    coordinator_end.close()


def hear_one(wire: Wire) -> Message:
    messages = wire.receive(10.0)
    assert messages
    return messages[0]


class TestPacerProcess:
    def test_counter_arrival_release_gate(
        self, pacer_process: tuple[PacerLink, Words, Wire]
    ) -> None:
        """A counter makes the pacer report, the coordinator's answer makes it open the gate."""
        link, words, wire = pacer_process
        gate = Point(4, 1)
        link.tell(Record(Kind.ARRIVE, at=Point(0, 1), gate=gate, position=7))
        link.tell(Record(Kind.ISSUED, gate=gate))
        words.counters[0] = 1
        arrived = hear_one(wire)
        assert (arrived.kind, arrived.position) == (Said.ARRIVE, 7)
        assert words.gates[4] == 0
        wire.send(Message(Said.RELEASE, 7, arrived.time_ns))
        link.await_answer(gate)
        words.counters[1] = 1
        link.tell(Record(Kind.STEP, at=Point(1, 1)), Record(Kind.END))
        assert len(link.hear()["steps"]) == 1
        assert words.gates[4] >= 1

    def test_pacer_that_ends_opens_every_gate(
        self, pacer_process: tuple[PacerLink, Words, Wire]
    ) -> None:
        """A coordinator that goes away leaves no stream held, and the rank is told."""
        link, words, wire = pacer_process
        wire.connection.close()
        with pytest.raises(StuckError, match="coordinator ended"):
            link.hear()
        assert words.gates.min() > 0


def test_capture_without_gpu_says_so(tmp_path: Path) -> None:
    """``--device cuda`` on a machine without one ends before the script starts."""
    from prismscale.capture.rank_process import capture_rank

    spec = CaptureSpec(
        rank=0,
        world_size=8,
        local_world_size=8,
        target="nothing.py",
        is_module=False,
        args=(),
        device="cuda",
        samples=1,
        step_marker=None,
        track_memory=True,
        communication_load=False,
        payloads=str(tmp_path),
        out=str(tmp_path),
    )
    with pytest.raises(UsageError, match="--device cpu"):
        capture_rank(spec)
