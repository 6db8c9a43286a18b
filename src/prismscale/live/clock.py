"""The clocks of a live rank.

*Logical* time is the time the rank would have on the cluster: the monotonic clock since the job
began, minus the time that the emulation itself cost (its lag). The virtual clock adds the waits
that were skipped. The script's own timers see logical time on the virtual clock, and the real clock
on the paced one.
"""

from __future__ import annotations

# Imported by name, because the program's ``time`` may answer logical time.
from time import perf_counter_ns, sleep
from typing import Protocol

SPIN_NS = 60_000
"""Shorter waits spin, because the scheduler's wake-up is less exact than this."""


class Clock(Protocol):
    """Logical time of one live rank, in nanoseconds since the job began."""

    def now_ns(self) -> int:
        """Logical time."""
        ...

    def wait_until(self, end_ns: int) -> None:
        """Return when logical time has reached ``end_ns``."""
        ...

    def forgive(self, lag_ns: int) -> None:
        """Take ``lag_ns`` that the emulation cost out of logical time."""
        ...


class PacedClock:
    """Waiting takes real time: profilers and the script's own timers see the truth."""

    def __init__(self, origin_ns: int) -> None:
        self._origin_ns = origin_ns

    def now_ns(self) -> int:
        """Monotonic clock since the origin, less forgiven lag."""
        return perf_counter_ns() - self._origin_ns

    def wait_until(self, end_ns: int) -> None:
        """Sleep, then spin the last bit."""
        target = end_ns + self._origin_ns
        while (left := target - perf_counter_ns()) > SPIN_NS:
            sleep((left - SPIN_NS) / 1e9)
        while perf_counter_ns() < target:
            pass

    def forgive(self, lag_ns: int) -> None:
        """Shift the origin: everything after is that much earlier."""
        self._origin_ns += lag_ns


class VirtualClock(PacedClock):
    """Waiting takes no time: the clock jumps."""

    def wait_until(self, end_ns: int) -> None:
        """Jump to ``end_ns`` if it lies ahead."""
        self._origin_ns -= max(0, end_ns - self.now_ns())

    def pass_ns(self, by_ns: int) -> None:
        """Jump ahead by ``by_ns``."""
        self._origin_ns -= by_ns
