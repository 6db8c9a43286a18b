"""Kernels of several streams on one device: they take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.capture.node_stream import NodeStream
from prismscale.cost.kernel import load_kernel_model
from prismscale.cost.launch_log import STATED, costs, recost
from prismscale.devices.null.device import NullDevice
from prismscale.devices.null.kernel_ledger import LAUNCH_LATENCY_NS, KernelLedger
from prismscale.devices.null.launch_reader import launch_log
from prismscale.devices.null.runtime import active
from support.device_time import device_ns

STREAMS = 3
CALL = 0
"""Signature of the launches of random programs."""
STEP = st.one_of(
    st.tuples(
        st.just("launch"), st.integers(0, STREAMS - 1), st.integers(0, 30), st.integers(0, 9),
        st.floats(0, 1),
    ),
    st.tuples(st.just("record"), st.integers(0, STREAMS - 1)),
    st.tuples(st.just("wait"), st.integers(0, STREAMS - 1), st.integers(0, 5)),
)  # fmt: skip


def moved(runs: list[tuple[int, int, int]], begin: int, end: int) -> list[tuple[int, int, int]]:
    """Kernels of a stream, behind another stream's kernel that runs from ``begin`` to ``end``."""
    found, earliest, is_behind = [], end, False
    for start, stop, latency in runs:
        if start >= begin and (is_behind or start < end):
            earliest = earliest + latency if is_behind else end
            is_behind, by = True, max(0, earliest - start)
            start, stop = start + by, stop + by
            earliest = stop
        found.append((start, stop, latency))
    return found


@dataclass
class Turns:
    """The same device in plain Python."""

    host_ns: int = 0
    tails_ns: list[int] = field(default_factory=lambda: [0] * STREAMS)
    events_ns: list[int] = field(default_factory=list)
    runs: list[list[tuple[int, int, int]]] = field(
        default_factory=lambda: [[] for _ in range(STREAMS)]
    )
    """Of each stream: when its kernels run, and how long after the kernel before at the least."""

    def launch(self, stream: int, device_ns: int, host_ns: int, busy_ns: int) -> None:
        self.host_ns += host_ns
        self.reckon(stream)
        due = max(self.host_ns, self.tails_ns[stream]) + device_ns - busy_ns
        if busy_ns:
            others = [other for other in range(STREAMS) if other != stream]
            while running := [
                end for o in others for start, end, _ in self.runs[o] if start <= due < end
            ]:
                due = max(running)
            for other in others:
                self.runs[other] = moved(self.runs[other], due, due + busy_ns)
            self.runs[stream].append((due, due + busy_ns, device_ns - busy_ns))
        self.tails_ns[stream] = due + busy_ns

    def reckon(self, stream: int) -> None:
        end = max([end for _, end, _ in self.runs[stream]], default=0)
        if end > self.host_ns:
            self.tails_ns[stream] = max(self.tails_ns[stream], end)

    def record(self, stream: int) -> None:
        self.reckon(stream)
        self.events_ns.append(max(self.tails_ns[stream], self.host_ns))

    def wait(self, stream: int, event: int) -> None:
        if event < len(self.events_ns):
            self.reckon(stream)
            self.tails_ns[stream] = max(self.tails_ns[stream], self.events_ns[event])


@settings(deadline=None, max_examples=300)
@given(st.lists(STEP, max_size=60))
def test_random_programs_take_turns_as_in_plain_python(steps: list[tuple[Any, ...]]) -> None:
    """The end of every stream, to the nanosecond."""
    library, turns = active().library, Turns()
    torch.cuda.synchronize()
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(STREAMS - 1))]
    events: list[torch.cuda.Event] = []
    origin_ns = library.ps_host_time_ns()
    for kind, stream, *rest in steps:
        if kind == "launch":
            device_ns, host_ns, share = rest
            busy_ns = round(device_ns * share)
            turns.launch(stream, device_ns, host_ns, busy_ns)
            raw = streams[stream].cuda_stream
            library.ps_launch(0, raw, CALL, device_ns, host_ns, busy_ns)
        elif kind == "record":
            turns.record(stream)
            events.append(streams[stream].record_event())
        elif rest[0] < len(events):
            turns.wait(stream, rest[0])
            streams[stream].wait_event(events[rest[0]])
    for number, stream in enumerate(streams):
        turns.reckon(number)
        ended_ns = library.ps_stream_time_ns(0, stream.cuda_stream) - origin_ns
        assert max(ended_ns, 0) == turns.tails_ns[number]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 30), st.integers(0, 9)), max_size=60))
def test_two_streams_never_run_at_once(launches: list[tuple[int, int, int]]) -> None:
    """Whatever moves, all of the work is done, one kernel at a time."""
    turns = Turns()
    for stream, ns, host_ns in launches:
        turns.launch(stream, ns, host_ns, ns)
    runs = sorted(run for stream in turns.runs for run in stream)
    assert all(end <= start for (_, end, _), (start, _, _) in pairwise(runs))
    assert sum(end - start for start, end, _ in runs) == sum(ns for _, ns, _ in launches)


@pytest.fixture
def ledger() -> Iterator[KernelLedger]:
    """The costs of an H100."""
    runtime = active()
    yield KernelLedger(runtime, load_kernel_model("h100-sxm"))
    runtime.library.ps_set_cost(None, 0, 0)


def beside(*parts: Callable[[], object]) -> Callable[[], None]:
    """Run each part on a stream of its own."""
    streams = [torch.cuda.Stream() for _ in parts]

    def run() -> None:
        here = torch.cuda.current_stream()
        for stream, part in zip(streams, parts, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                part()
        for stream in streams:
            here.wait_stream(stream)

    return run


def product() -> Callable[[], object]:
    """Matrices whose product takes milliseconds."""
    a, b = (torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return lambda: a @ b


@pytest.mark.usefixtures("ledger")
def test_two_products_take_as_long_beside_each_other_as_one_after_the_other() -> None:
    """But for the launch latency of the second."""
    first, second = product(), product()
    alone_ns = device_ns(lambda: (first(), second()))
    assert alone_ns - device_ns(beside(first, second)) == pytest.approx(LAUNCH_LATENCY_NS, abs=40)


@pytest.mark.usefixtures("ledger")
def test_a_copy_to_the_host_runs_beside_a_product() -> None:
    """A copy engine makes it."""
    multiply = product()
    there = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    here = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        here.copy_(there, non_blocking=True)

    longest_ns = max(device_ns(multiply), device_ns(copy))
    assert device_ns(beside(multiply, copy)) < 1.05 * longest_ns


@pytest.mark.usefixtures("ledger")
def test_branches_of_a_graph_take_turns() -> None:
    """A replay takes as long as the eager program."""
    run = beside(product(), product())
    eager_ns = device_ns(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    assert device_ns(graph.replay) == pytest.approx(eager_ns, rel=0.02)


@pytest.mark.usefixtures("ledger")
def test_a_short_kernel_waits_for_one_kernel_of_a_long_queue() -> None:
    """The host has launched ten products by then; it is the second kernel to run."""
    multiply, side = product(), torch.cuda.Stream()
    x = torch.empty(1 << 20, device="cuda")
    one_ns = device_ns(multiply)
    torch.cuda.synchronize()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(10):
        multiply()
    with torch.cuda.stream(side):
        x.add_(1)
        ended.record()
    torch.cuda.synchronize()
    assert began.elapsed_time(ended) * 1e6 < 1.2 * one_ns


def test_waits_are_recorded_beside_the_launches(ledger: KernelLedger) -> None:
    """The log gives the nodes' durations with them."""
    runtime, nodes = active(), NodeStream()
    spans = NullDevice(runtime).spans(nodes, "forward")
    beside(product(), product())()
    spans.close()
    log = launch_log(runtime.library)
    log = log.for_trace(prologue_stop=0, body_start=0, body_stop=len(nodes.nodes))
    waits_E = (log.signature_E == STATED) & (log.lane_E > 0)
    assert log.stated_ns_E[waits_E].sum() > 1_000_000
    durations_ns = recost(log, *costs(log, load_kernel_model("h100-sxm")))
    recorded = [nodes.nodes[n] for n in log.node_N.tolist()]
    assert durations_ns.tolist() == [node.ended - node.began for node in recorded]
