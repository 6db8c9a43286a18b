"""Programs of random ops, and the null device that condenses them: shared by tests of spans."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from prismscale.capture.node_stream import NodeStream, StreamNode
from prismscale.devices.null.condensed_spans import NOT_HELD, NullSpans
from prismscale.devices.null.runtime import active
from prismscale.graph.node import NodeKind

STREAMS = 3
CHANNELS = 2
"""Communications take turns; each comes after the one before in its channel."""
MOST_NS = 20
TIME_NS = st.integers(0, MOST_NS)
STREAM = st.integers(0, STREAMS - 1)
DEPTH, BETWEEN_POINTS = 16, 2
"""Launches that a stream's queue holds here, and between the points at which the graph looks."""
STEP = st.one_of(
    st.tuples(st.just("launch"), STREAM, TIME_NS, TIME_NS),
    st.tuples(st.just("record"), STREAM),
    st.tuples(st.just("wait"), STREAM, st.integers(0, 5)),
    st.tuples(st.just("host waits"), st.integers(0, 5)),
    st.tuples(st.just("synchronize"), STREAM),
    st.tuples(st.just("communicate"), STREAM, st.integers(0, 60), st.booleans()),
    st.tuples(st.just("join"), STREAM, st.integers(0, 5), st.booleans()),
    st.tuples(st.just("label"), st.sampled_from(["b", NOT_HELD])),
    st.tuples(st.just("step")),
)
LAUNCHES = st.lists(st.tuples(st.just("launch"), STREAM, TIME_NS, TIME_NS), max_size=40)
PROGRAM = st.lists(st.one_of(STEP.map(lambda step: [step]), LAUNCHES), max_size=40).map(
    lambda parts: [step for part in parts for step in part]
)
"""Streams' queues fill up in a run of launches, seldom by launches between other things."""


def signature_of(device_ns: int, host_ns: int) -> int:
    """Number of the call that costs this much."""
    return device_ns * (MOST_NS + 1) + host_ns


class Condensed:
    """The same program on the null device, recorded."""

    def __init__(self, slowness: int = 1, is_busy: bool = False) -> None:
        """``is_busy``: kernels hold the multiprocessors, so that those of several streams take
        turns."""
        self.slowness, self.is_busy = slowness, is_busy
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
        times = device_ns * self.slowness, host_ns * self.slowness
        busy_ns = times[0] if self.is_busy else 0
        self.library.ps_launch(
            0, self.cuda[stream].cuda_stream, signature_of(device_ns, host_ns), *times, busy_ns
        )

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

    def label(self, label: str = "b") -> None:
        self.spans.label = label

    def step(self) -> None:
        self.label("a")
        self.nodes.mark()
        self.library.ps_spans_step_ended()

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
