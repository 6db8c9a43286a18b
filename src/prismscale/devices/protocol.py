"""Protocols between the recorder and the device on which a program computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from prismscale.graph.builder import Names
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import MemoryRecord

Mark = Any
"""A point in device time: a number on a CPU, an event on a stream on a GPU."""


CommunicationEnd = Callable[[], None]
"""Call that makes the program's next work wait for the end of a communication."""


class LaneObserver(Protocol):
    """Receiver of what the program does with its lanes."""

    def lane_switched(self, before: str, after: str) -> None:
        """Note that the program's work goes to lane ``after`` from now on."""
        ...

    def lane_frontier(self, lane: str) -> tuple[int, ...]:
        """Return the nodes that are done once ``lane`` has done all work that it was given."""
        ...

    def lane_waits(self, lane: str, frontier: tuple[int, ...], order: Callable[[], None]) -> None:
        """Note that ``lane`` waits for a frontier. Call ``order`` to make the device do so."""
        ...


class RecordedNode(Protocol):
    """A node of a recorded stream, with its predecessors and its lane."""

    kind: NodeKind
    preds: tuple[int, ...]
    lane: int


class SpanSink(Protocol):
    """The recorded stream of nodes, to which a device appends the program's computation."""

    lanes: Names
    labels: Names

    @property
    def nodes(self) -> Sequence[RecordedNode]:
        """All nodes so far, communications included."""
        ...

    def add_computation(
        self, *, preds: tuple[int, ...], lane: int, label: int, began: Mark, ended: Mark
    ) -> int:
        """Append a span of computation and return its position."""
        ...


class ProgramLane(Protocol):
    """One lane of the program, at a cut between two spans.

    Nodes are given by their positions in a :class:`SpanSink`.
    """

    def issues(self, by_host: bool) -> tuple[int, ...]:
        """Return the nodes that must be done before what the program issues now can begin.

        ``by_host``: it works on host memory only and has no part in the device's order.
        """
        ...

    def joins(self, nodes: Sequence[int], by_host: bool) -> None:
        """Order the lane's next work after ``nodes``; with ``by_host`` the host itself waits."""
        ...


class ProgramSpans(Protocol):
    """Writer of the program's computation into a node stream: one span between two cuts."""

    label: str
    """Label of all spans that close from now on."""

    def paused(
        self, name: str | None = None, ended: Mark = None
    ) -> AbstractContextManager[ProgramLane]:
        """Close a lane's span for the duration of the block, which is not the program's work.

        ``name``: the lane; None: the current one. ``ended``: the mark at which the span ended, if
        the caller has one; None: now.
        """
        ...

    def communicates(self) -> None:
        """Note that the program issues a communication of the device, which its host does."""
        ...

    def switch(self, before: str, after: str) -> None:
        """Note that the program goes from one lane to another."""
        ...

    def restart(self) -> None:
        """Restart the current lane's span: the time since it began was not the program's work."""
        ...

    def close(self) -> None:
        """Close the span of the current lane."""
        ...


class CaptureDevice(Protocol):
    """A device as the recorder sees it: it times spans and runs communications."""

    name: str

    def spans(self, stream: SpanSink, label: str) -> ProgramSpans:
        """Begin the spans of a program, which are written to ``stream``."""
        ...

    def elapsed_ns(self, began: Mark, ended: Mark) -> int:
        """Return the nanoseconds between two marks; may wait for the device."""
        ...

    def communicate(
        self, channel: object, fill: Callable[[], None], *, blocks_host: bool
    ) -> CommunicationEnd:
        """Run ``fill`` as a communication would run, after the work issued so far.

        ``channel``: communications of one channel run in order.
        ``blocks_host``: a wait for it blocks the host, not only a device stream.
        """
        ...

    def observed(self, observer: LaneObserver) -> AbstractContextManager[None]:
        """Tell ``observer``, during the block, what the program itself does with lanes."""
        ...


class MarkingDevice(CaptureDevice, Protocol):
    """A device on which a point in time can be marked."""

    def lane(self) -> str:
        """Return the lane to which work issued now goes: a host thread or a device stream."""
        ...

    def mark(self, lane: str) -> Mark:
        """Return the point in device time at which ``lane`` will have done its work so far."""
        ...


class MemoryTracker(Protocol):
    """Tracker of a device's allocated bytes, step by step."""

    def start(self) -> None:
        """Begin; called before the program's first line."""
        ...

    def optimizer_begins(self) -> None:
        """Note that an optimizer is about to step: the gradients exist now."""
        ...

    def step_ended(self) -> None:
        """Note that a step ended."""
        ...

    def stop(self) -> MemoryRecord:
        """Return the peaks so far; tracking costs nothing from here on."""
        ...


class NullMemoryTracker:
    """A memory tracker that tracks nothing."""

    def start(self) -> None:
        """Do nothing."""

    def optimizer_begins(self) -> None:
        """Do nothing."""

    def step_ended(self) -> None:
        """Do nothing."""

    def stop(self) -> MemoryRecord:
        """Return an empty record."""
        return MemoryRecord(peak_bytes=0, peak_step=-1, source="untracked")
