"""The seam between recording and the device a program computes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from prismscale.graph.builder import Names
from prismscale.graph.trace import MemoryRecord

Mark = Any
"""A point in device time: a number on the CPU, an event on a stream on a GPU."""


CommunicationEnd = Callable[[], None]
"""Orders what the program does next after a communication's end."""


class LaneObserver(Protocol):
    """Told what the program does with its lanes."""

    def lane_switched(self, before: str, after: str) -> None:
        """Work of the program goes to lane ``after`` from now on."""
        ...

    def lane_frontier(self, lane: str) -> tuple[int, ...]:
        """What must be done for ``lane`` to have done all that it was given so far."""
        ...

    def lane_waits(self, lane: str, frontier: tuple[int, ...], order: Callable[[], None]) -> None:
        """``lane`` waits for a frontier; ``order`` makes it so on the device."""
        ...


class RecordedNode(Protocol):
    """A node of a stream: what follows what, on which lane."""

    preds: tuple[int, ...]
    lane: int


class SpanSink(Protocol):
    """Where a device writes the program's computation: the stream of nodes that is recorded."""

    lanes: Names
    labels: Names

    @property
    def nodes(self) -> Sequence[RecordedNode]:
        """All nodes so far, communications among them."""
        ...

    def add_computation(
        self, *, preds: tuple[int, ...], lane: int, label: int, began: Mark, ended: Mark
    ) -> int:
        """Add a span of computation; returns its position."""
        ...


class ProgramLane(Protocol):
    """Where one lane of the program is, between two of its spans. Nodes are positions in a
    :class:`SpanSink`."""

    def issues(self, by_host: bool) -> tuple[int, ...]:
        """Nodes that must be done before what the program issues here begins.

        ``by_host``: it works on the host's own memory and never sees the device.
        """
        ...

    def joins(self, nodes: Sequence[int], by_host: bool) -> None:
        """What the lane does from now on comes after ``nodes``; with ``by_host`` the host waits."""
        ...


class ProgramSpans(Protocol):
    """Writes the program's computation into a node stream, one span between two cuts."""

    label: str
    """What spans are called from now on."""

    def paused(
        self, name: str | None = None, ended: Mark = None
    ) -> AbstractContextManager[ProgramLane]:
        """Close the span of a lane (None: the current one) meanwhile: nothing in it is its work.
        ``ended``: where it did, on a device whose marks can be had from others (None: now)."""
        ...

    def switch(self, before: str, after: str) -> None:
        """The program goes from one lane to another."""
        ...

    def restart(self) -> None:
        """What the current lane did since its span began was not the program's work."""
        ...

    def close(self) -> None:
        """Close the span of the current lane."""
        ...


class CaptureDevice(Protocol):
    """Time of one device, and where its communications run."""

    name: str

    def spans(self, stream: SpanSink, label: str) -> ProgramSpans:
        """The spans of a program that begins now, to be written to ``stream``."""
        ...

    def elapsed_ns(self, began: Mark, ended: Mark) -> int:
        """Nanoseconds between two marks; may wait for the device."""
        ...

    def communicate(
        self, channel: object, fill: Callable[[], None], *, blocks_host: bool
    ) -> CommunicationEnd:
        """Run ``fill`` as a communication would run, after the work issued so far.

        ``channel``: communications with equal ones run in order.
        ``blocks_host``: waiting for it is the host's affair, not only the device's.
        """
        ...

    def observed(self, observer: LaneObserver) -> AbstractContextManager[None]:
        """Tell ``observer`` meanwhile what the program does with lanes by itself."""
        ...


class MarkingDevice(CaptureDevice, Protocol):
    """A device whose time is read off where it is."""

    def lane(self) -> str:
        """The lane that work issued now goes to: a host thread or a device stream."""
        ...

    def mark(self, lane: str) -> Mark:
        """The point in device time that work issued to ``lane`` so far will reach."""
        ...


class MemoryTracker(Protocol):
    """Follows a device's allocated bytes, step by step."""

    def start(self) -> None:
        """Begin; called before the program's first line."""
        ...

    def optimizer_begins(self) -> None:
        """An optimizer is about to step: gradients are there."""
        ...

    def step_ended(self) -> None:
        """A step ended."""
        ...

    def stop(self) -> MemoryRecord:
        """The peaks so far; tracking costs nothing from here on."""
        ...


class NullMemoryTracker:
    """Tracks nothing and reports nothing."""

    def start(self) -> None:
        """Nothing to begin."""

    def optimizer_begins(self) -> None:
        """Nothing to look at."""

    def step_ended(self) -> None:
        """Nothing to note."""

    def stop(self) -> MemoryRecord:
        """A record of nothing."""
        return MemoryRecord(peak_bytes=0, peak_step=-1, source="untracked")
