"""The seam between recording and the device a program computes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

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


class CaptureDevice(Protocol):
    """Time of one device, and where its communications run."""

    name: str

    def lane(self) -> str:
        """The lane that work issued now goes to: a host thread or a device stream."""
        ...

    def mark(self, lane: str) -> Mark:
        """The point in device time that work issued to ``lane`` so far will reach."""
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


class MemoryTracker(Protocol):
    """Follows a device's allocated bytes, step by step."""

    def start(self) -> None:
        """Begin; called before the program's first line."""
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

    def step_ended(self) -> None:
        """Nothing to note."""

    def stop(self) -> MemoryRecord:
        """A record of nothing."""
        return MemoryRecord(peak_bytes=0, peak_step=-1, source="untracked")
