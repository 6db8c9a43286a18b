"""Condensed spans: a handful of nodes, and the same times as one node an op."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.capture.device.null.runtime import active
from prismscale.capture.device.null.spans import NullSpans
from prismscale.capture.stream import NodeStream, StreamNode
from prismscale.graph.node import NodeKind

STREAMS = 3
CHANNELS = 2
"""Communications take turns; each comes after the one before in its channel."""
TIME_NS = st.integers(0, 20)
STREAM = st.integers(0, STREAMS - 1)
STEP = st.one_of(
    st.tuples(st.just("launch"), STREAM, TIME_NS, TIME_NS),
    st.tuples(st.just("record"), STREAM),
    st.tuples(st.just("wait"), STREAM, st.integers(0, 5)),
    st.tuples(st.just("host waits"), st.integers(0, 5)),
    st.tuples(st.just("synchronize"), STREAM),
    st.tuples(st.just("communicate"), STREAM, st.integers(0, 60), st.booleans()),
    st.tuples(st.just("join"), STREAM, st.integers(0, 5), st.booleans()),
    st.tuples(
        st.just("label"),
    ),
)


class OpByOp:
    """Where host and streams are, one op at a time."""

    def __init__(self) -> None:
        self.host = 0
        self.streams = [0] * STREAMS
        self.events: list[int] = []
        self.ends: list[int] = []
        self.arrivals: list[int] = []

    def run(self, steps: list[tuple[Any, ...]]) -> None:
        for kind, *rest in steps:
            getattr(self, kind.replace(" ", "_"))(*rest)

    def launch(self, stream: int, device_ns: int, host_ns: int) -> None:
        self.host += host_ns
        self.streams[stream] = max(self.streams[stream], self.host) + device_ns

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

    def join(self, stream: int, which: int, by_host: bool) -> None:
        if which >= len(self.ends):
            return
        if by_host:
            self.host = max(self.host, self.ends[which])
        else:
            self.streams[stream] = max(self.streams[stream], self.ends[which])

    def label(self) -> None:
        """Changes nothing."""


class Condensed:
    """The same program on the null device, recorded."""

    def __init__(self) -> None:
        self.library = active().library
        self.nodes = NodeStream()
        self.spans = NullSpans(self.library, self.nodes, "a")
        self.cuda = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        self.events: list[torch.cuda.Event] = []
        self.calls: list[int] = []

    def run(self, steps: list[tuple[Any, ...]]) -> None:
        for kind, *rest in steps:
            getattr(self, kind.replace(" ", "_"))(*rest)

    def launch(self, stream: int, device_ns: int, host_ns: int) -> None:
        self.library.ps_launch(0, self.cuda[stream].cuda_stream, device_ns, host_ns)

    def record(self, stream: int) -> None:
        self.events.append(self.cuda[stream].record_event())

    def wait(self, stream: int, event: int) -> None:
        if event < len(self.events):
            self.cuda[stream].wait_event(self.events[event])

    def host_waits(self, event: int) -> None:
        if event < len(self.events):
            self.events[event].synchronize()

    def synchronize(self, stream: int) -> None:
        self.cuda[stream].synchronize()

    def communicate(self, stream: int, duration_ns: int, by_host: bool) -> None:
        with torch.cuda.stream(self.cuda[stream]), self.spans.paused() as here:
            behind = self.calls[-CHANNELS:][:1] if len(self.calls) >= CHANNELS else []
            preds = (*here.issues(by_host), *behind)
            lane = 100 + len(self.calls) % CHANNELS
            node = StreamNode(
                kind=NodeKind.COLLECTIVE, preds=preds, lane=lane, label=0, ended=duration_ns
            )
            self.calls.append(self.nodes.append(node))

    def join(self, stream: int, which: int, by_host: bool) -> None:
        if which < len(self.calls):
            with torch.cuda.stream(self.cuda[stream]), self.spans.paused() as lane:
                lane.joins([self.calls[which]], by_host)

    def label(self) -> None:
        self.spans.label = "b"

    def ends(self) -> list[int]:
        """End of every node."""
        ends: list[int] = []
        for node in self.nodes.nodes:
            ends.append(max((ends[p] for p in node.preds), default=0) + node.ended - node.began)
        return ends

    def arrivals(self) -> list[int]:
        """When each communication could begin."""
        ends, nodes = self.ends(), self.nodes.nodes
        return [max((ends[p] for p in nodes[call].preds), default=0) for call in self.calls]


def observed(steps: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """With communications at the end that see where every stream and the host are."""
    return [*steps, *(("communicate", s, 0, by_host) for s in range(STREAMS) for by_host in (0, 1))]


@settings(deadline=None, max_examples=400)
@given(st.lists(STEP, max_size=60))
def test_spans_take_as_long_as_their_ops_one_by_one(steps: list[tuple[Any, ...]]) -> None:
    """Every communication begins when it would if each op were a node."""
    one_by_one, condensed = OpByOp(), Condensed()
    one_by_one.run(observed(steps))
    condensed.run(observed(steps))
    assert condensed.arrivals() == one_by_one.arrivals


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


def test_the_emulations_own_work_costs_nothing() -> None:
    """Ops while the recorder works are in no span."""
    condensed = Condensed()
    with condensed.spans.paused():
        condensed.launch(0, 100, 100)
        torch.ones(8, device="cuda").sum()
    condensed.communicate(0, 0, False)
    assert condensed.arrivals() == [0]


def test_labels_tell_work_from_waiting_for_the_host() -> None:
    """A launch path is named for the phase, and for the host."""
    condensed = Condensed()
    condensed.launch(0, 1, 1)
    condensed.label()
    names = condensed.nodes.labels.all()
    assert [names[n.label] for n in condensed.nodes.nodes] == ["a", "a, host", "a, host"]
