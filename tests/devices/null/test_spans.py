"""Condensed spans: a handful of nodes, and the same times as one node an op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from span_programs import (
    BETWEEN_POINTS,
    CHANNELS,
    DEPTH,
    PROGRAM,
    STREAM,
    STREAMS,
    TIME_NS,
    Condensed,
    observed,
)

from prismscale.capture.node_stream import StreamNode
from prismscale.devices.null.condensed_spans import NOT_HELD
from prismscale.devices.null.runtime import active
from prismscale.graph.node import NodeKind


@pytest.fixture(autouse=True)
def short_queues() -> Iterator[None]:
    """Queues that small programs fill."""
    runtime = active()
    runtime.library.ps_set_launch_queue_depth(DEPTH)
    yield
    runtime.library.ps_set_launch_queue_depth(runtime.spec.launch_queue_depth)


class OpByOp:
    """Where host and streams are, one op at a time.

    A launch waits while its stream's queue holds ``DEPTH`` that are not done. With ``at_points``
    the host waits as in the graph, at points of the step: for the first earlier point after which,
    with twice as many launches as lie between points, no more than ``DEPTH`` were not done.
    """

    def __init__(self, *, at_points: bool) -> None:
        self.at_points = at_points
        self.counts = not at_points
        """In the graph, from the first communication or change of labels on."""
        self.held = True
        self.host = 0
        self.launch_ends: list[list[int]] = [[] for _ in range(STREAMS)]
        """Of each stream, when each of its launches (at points: of this step) was done."""
        self.points: list[list[tuple[int, int]]] = [[] for _ in range(STREAMS)]
        """Of each stream: its launches of this step at a point, and when all it did was done."""
        self.room = [DEPTH] * STREAMS
        self.streams = [0] * STREAMS
        self.events: list[int] = []
        self.ends: list[int] = []
        self.arrivals: list[int] = []

    def run(self, steps: list[tuple[Any, ...]]) -> None:
        for kind, *rest in steps:
            getattr(self, kind.replace(" ", "_"))(*rest)

    def launch(self, stream: int, device_ns: int, host_ns: int) -> None:
        if device_ns and not self.at_points:
            self.wait_for_room(stream)
        self.host += host_ns
        self.streams[stream] = max(self.streams[stream], self.host) + device_ns
        if device_ns and self.counts:
            self.launch_ends[stream].append(self.streams[stream])
            before = self.points[stream][-1][0] if self.points[stream] else 0
            if len(self.launch_ends[stream]) >= before + BETWEEN_POINTS:
                self.point()

    def wait_for_room(self, stream: int) -> None:
        ends = self.launch_ends[stream]
        if len(ends) >= DEPTH:
            self.host = max(self.host, ends[-DEPTH])

    def point(self) -> None:
        if not self.held or not self.at_points:
            return
        for stream, ends in enumerate(self.launch_ends):
            points, launches = self.points[stream], len(ends)
            if launches > (points[-1][0] if points else 0):
                points.append((launches, self.streams[stream]))
            if launches + BETWEEN_POINTS > self.room[stream]:
                needed = launches + 2 * BETWEEN_POINTS - DEPTH
                done, done_ns = next(point for point in points if point[0] >= needed)
                self.host = max(self.host, done_ns)
                self.room[stream] = done + DEPTH

    def step(self) -> None:
        self.label("a")
        if self.at_points:
            self.launch_ends = [[] for _ in range(STREAMS)]
            self.points = [[] for _ in range(STREAMS)]
            self.room = [DEPTH] * STREAMS

    def record(self, stream: int) -> None:
        self.events.append(self.streams[stream])

    def wait(self, stream: int, event: int) -> None:
        if event < len(self.events):
            self.streams[stream] = max(self.streams[stream], self.events[event])

    def host_waits(self, event: int) -> None:
        if event < len(self.events):
            self.host = max(self.host, self.events[event])

    def synchronize(self, stream: int) -> None:
        self.host = max(self.host, self.streams[stream])

    def communicate(self, stream: int, duration_ns: int, by_host: bool) -> None:
        issued = self.host if by_host else max(self.host, self.streams[stream])
        before = self.ends[-CHANNELS] if len(self.ends) >= CHANNELS else 0
        self.arrivals.append(max(issued, before))
        self.ends.append(self.arrivals[-1] + duration_ns)
        if not by_host:
            self.counts = True
            self.point()

    def join(self, stream: int, which: int, by_host: bool) -> None:
        if which >= len(self.ends):
            return
        if by_host:
            self.host = max(self.host, self.ends[which])
        else:
            self.streams[stream] = max(self.streams[stream], self.ends[which])

    def label(self, label: str) -> None:
        self.counts = True
        self.point()
        self.held = label != NOT_HELD


@settings(deadline=None, max_examples=400)
@given(PROGRAM)
def test_spans_take_as_long_as_their_ops_one_by_one(steps: list[tuple[Any, ...]]) -> None:
    """Every communication begins when it would if each op were a node."""
    one_by_one, condensed = OpByOp(at_points=True), Condensed()
    one_by_one.run(observed(steps))
    condensed.run(observed(steps))
    assert condensed.arrivals() == one_by_one.arrivals


@settings(deadline=None, max_examples=200)
@given(PROGRAM)
def test_the_programs_own_time_knows_launch_queues(steps: list[tuple[Any, ...]]) -> None:
    """The host's clock shows when a full queue let it go on."""
    steps = [s for s in steps if s[0] not in ("communicate", "join")]
    torch.cuda.synchronize()
    one_by_one, condensed = OpByOp(at_points=False), Condensed()
    began_ns = condensed.library.ps_host_time_ns()
    one_by_one.run(steps)
    condensed.run(steps)
    assert condensed.library.ps_host_time_ns() - began_ns == one_by_one.host


def test_a_queue_never_holds_more_than_its_depth() -> None:
    """In the program's own time; in the graph a host that is quicker goes as far ahead, and is
    never held at less than 5/8 of it."""
    torch.cuda.synchronize()
    condensed, began_ns = Condensed(), active().library.ps_host_time_ns()
    condensed.label()
    for launch in range(1, 200):
        condensed.launch(0, 10, 0)
        if launch % 37 == 0:
            condensed.label()
        host_ns = condensed.library.ps_host_time_ns() - began_ns
        assert host_ns == 10 * max(0, launch - DEPTH)
        condensed.communicate(0, 0, True)
    ahead = [n - at // 10 for n, at in enumerate(condensed.arrivals(), start=1)]
    assert max(ahead) <= DEPTH
    assert min(ahead[DEPTH:]) > DEPTH * 5 // 8


@pytest.mark.parametrize("depth", [DEPTH, 1024])
@pytest.mark.parametrize("launches", [1, 3, 33, 100, 1700])
def test_steps_of_any_length_look_equal_at_once(launches: int, depth: int) -> None:
    """The second and the third step, after a first one that differs."""
    condensed = Condensed()
    condensed.library.ps_set_launch_queue_depth(depth)
    for extra in (5, 0, 0):
        for label, more in (("a", extra), ("b", 0), (NOT_HELD, 3 * extra)):
            condensed.label(label)
            for _ in range(launches + more):
                condensed.launch(0, 3, 1)
                condensed.launch(1, 2, 1)
        for _ in range(CHANNELS):
            condensed.communicate(0, 0, False)
        condensed.step()
    nodes = condensed.nodes
    assert nodes.signatures[1] == nodes.signatures[2]
    assert nodes.reaches[2] >= nodes.marks[0]  # edges end in steps that were compared


def test_how_a_model_was_made_leaves_no_trace() -> None:
    """Any number of launches before the first communication are two nodes, and the host."""
    condensed = Condensed()
    for _ in range(5 * DEPTH):
        condensed.launch(0, 3, 2)
    condensed.communicate(0, 0, False)
    assert len(condensed.nodes.nodes) == 4


def test_a_span_of_many_ops_is_two_nodes() -> None:
    """Work of the stream, and the launch path beside it; the host is one more."""
    condensed = Condensed()
    for _ in range(1000):
        condensed.launch(0, 3, 2)
    condensed.communicate(0, 0, False)
    assert [n.ended for n in condensed.nodes.nodes[:-1]] == [2000, 3000, 3002]


def test_a_lane_that_only_waits_keeps_few_predecessors() -> None:
    """A stream that gathers for others collects no edges over a step."""
    condensed = Condensed()
    for k in range(50):
        condensed.launch(0, 1, 1)
        condensed.record(0)
        condensed.wait(1, k)
        condensed.communicate(1, 5, False)
        condensed.join(1, k, False)
    assert max(len(n.preds) for n in condensed.nodes.nodes) < 12


def test_a_stream_that_rests_is_waited_for_once() -> None:
    """Waiting for the whole device again comes after nothing that was waited for before, or no step
    would look like the one before it."""
    condensed = Condensed()
    condensed.launch(1, 3, 2)
    before = 0
    for _ in range(3):
        before = len(condensed.nodes.nodes)
        condensed.launch(0, 3, 2)
        for stream in range(STREAMS):
            condensed.synchronize(stream)
        condensed.communicate(0, 0, False)
    nodes = condensed.nodes.nodes
    computed = [p for p in nodes[-1].preds if nodes[p].kind == NodeKind.COMPUTE]
    assert min(computed) >= before


def test_the_emulations_own_work_costs_nothing() -> None:
    """Ops while the recorder works are in no span."""
    condensed = Condensed()
    with condensed.spans.paused():
        condensed.launch(0, 100, 100)
        torch.ones(8, device="cuda").sum()
    condensed.communicate(0, 0, False)
    assert condensed.arrivals() == [0]


def test_issuing_a_communication_takes_the_host_alone() -> None:
    """As long as the ledger says; the stream does no work for it."""
    condensed = Condensed()
    before_ns = condensed.library.ps_host_time_ns()
    condensed.spans.communicates()
    took_ns = condensed.library.ps_host_time_ns() - before_ns
    condensed.communicate(0, 0, False)
    assert took_ns > 0
    assert condensed.arrivals() == [took_ns]


def test_work_behind_a_communication_does_not_take_turns_with_what_it_follows() -> None:
    """A stream that waits for a communication comes after the work before it, in its own time, too:
    its kernel waits for no kernel of that work once more."""
    condensed = Condensed(is_busy=True)
    condensed.launch(0, 20, 1)
    condensed.communicate(0, 0, False)
    condensed.join(1, 0, False)
    condensed.launch(1, 5, 1)
    condensed.communicate(1, 0, False)
    nodes = condensed.nodes.nodes
    communications = [k for k, n in enumerate(nodes) if n.kind != NodeKind.COMPUTE]
    behind = [n.ended - n.began for n in nodes[communications[0] :] if n.kind == NodeKind.COMPUTE]
    assert max(behind) < 20


def test_labels_tell_work_from_waiting_for_the_host() -> None:
    """A launch path is named for the phase, and for the host."""
    condensed = Condensed()
    condensed.launch(0, 1, 1)
    condensed.label()
    names = condensed.nodes.labels.all()
    assert [names[n.label] for n in condensed.nodes.nodes] == ["a", "a, host", "a, host"]


def test_all_of_many_predecessors_are_recorded() -> None:
    """The host has waited for 100 communications on lanes of their own."""
    condensed = Condensed()
    calls = []
    for lane in range(100):
        with condensed.spans.paused():
            node = StreamNode(
                kind=NodeKind.COLLECTIVE, preds=(), lane=200 + lane, label=0, ended=lane
            )
            calls.append(condensed.nodes.append(node))
    with condensed.spans.paused() as here:
        here.joins(calls, True)
    with condensed.spans.paused() as here:
        assert set(here.issues(True)) == set(calls)


PASSED_ON = st.lists(
    st.one_of(
        st.tuples(st.just("launch"), STREAM, TIME_NS),
        st.tuples(st.just("pass on"), STREAM, STREAM, TIME_NS),
    ),
    max_size=20,
)
"""Launches, and communications of one stream for which another waits."""


@settings(deadline=None, max_examples=400)
@given(PASSED_ON)
def test_turns_take_no_longer_than_all_work_one_after_another(parts: list[tuple[Any, ...]]) -> None:
    """Kernels that take turns wait for each other once: something is always at work.

    The host takes no time here, which would hide a kernel that waits twice.
    """
    torch.cuda.synchronize()  # what an earlier program left
    condensed = Condensed(is_busy=True)
    for kind, stream, *rest in parts:
        if kind == "launch":
            condensed.launch(stream, rest[0], 0)
        else:
            condensed.communicate(stream, rest[1], False)
            condensed.join(rest[0], len(condensed.calls) - 1, False)
    condensed.run(observed([]))
    assert max(condensed.ends()) <= sum(part[-1] for part in parts)
