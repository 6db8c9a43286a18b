"""The seam between recording and the device a program computes on."""

from __future__ import annotations

from typing import Any, Protocol

from prismscale.graph.trace import MemoryRecord

Mark = Any
"""A point in device time: a number on the CPU, an event on a stream on a GPU."""


class CaptureDevice(Protocol):
    """Time and memory of one device."""

    name: str

    def mark(self) -> Mark:
        """The point in device time that work issued so far will reach."""
        ...

    def elapsed_ns(self, began: Mark, ended: Mark) -> int:
        """Nanoseconds between two marks; may wait for the device."""
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
