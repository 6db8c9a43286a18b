"""The part of the time between two calls that was the program's computation.

[Note: interruptions] gloo's threads run on the core of the thread that woke them, often for a whole
time slice: a loop thread spins as long as the worker that holds its lock is not running. If the
program computes beside them for long, the time that they take from it counts as computation. If it
waits soon after the issue, it is in effect waiting already while they run in its place. That time
is the communication's work and belongs to the communication. Counted as computation, and replayed
beside other steps' communications, it made a tensor-parallel step 8 % too long. So if a program is
interrupted for longer than it computed between issue and wait, the excess counts as waiting, in
captures and in live ranks.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import (  # by name: a program's ``time`` may be logical
    clock_gettime_ns,
    perf_counter_ns,
    thread_time_ns,
)

from prismscale.emulation.hook import Collective
from prismscale.host_comm.local_work import CommunicationLoad


def moment() -> tuple[int, int]:
    """The time now (ns) on the monotonic clock and on this thread's processor clock."""
    return perf_counter_ns(), thread_time_ns()


def since_call_ns(batch: Sequence[Collective], load: CommunicationLoad) -> int:
    """Time (ns) since the program's call, if ``load`` works on the program's core.

    The call's time so far is no computation. 0 for other loads, and where the time of the call is
    not known.
    """
    called_ns = batch[0].called_ns
    return perf_counter_ns() - called_ns if called_ns and load.interrupts else 0


class RunQueue:
    """Time (ns) that this thread was runnable but not running.

    The time is read from ``/proc/thread-self/schedstat``. It is at most the processor time that the
    emulation's other processes took meanwhile, because a real rank is delayed too, by its own
    threads and by a CPU quota that is used up. 0 on systems without schedstat.
    """

    def __init__(self, others: Iterable[int] = ()) -> None:
        """``others``: process ids of the emulation's other processes."""
        self._thread = threading.get_ident()
        clocks = (_processor_clock(other) for other in others)
        self._others = [clock for clock in clocks if clock is not None]
        self._file: int | None = None
        self._since: tuple[int, int] | None = None
        if self._others:
            with suppress(OSError):
                # The path is resolved when it is opened, so the file stays this thread's.
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def go(self) -> None:
        """Note that the thread runs: measure from here."""
        self._since = self._now()

    def delayed_ns(self) -> int:
        """The delay since :meth:`go`. The thread itself must ask."""
        since, now = self._since, self._now()
        if since is None or now is None:
            return 0
        return min(now[0] - since[0], now[1] - since[1])

    def _now(self) -> tuple[int, int] | None:
        """Total delay of the thread, and processor time of the other processes."""
        if self._file is None or threading.get_ident() != self._thread:
            return None
        try:
            ran_ns = sum(map(clock_gettime_ns, self._others))
        except OSError:  # a process has ended, and its processor time is not known
            self._others = [clock for clock in self._others if _goes_on(clock)]
            return None
        # Nanoseconds on a core, nanoseconds ready to run without one, and time slices.
        return int(os.pread(self._file, 64, 0).split()[1]), ran_ns

    def close(self) -> None:
        """Close the file; later readings are 0. Safe to call again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _processor_clock(pid: int) -> int | None:
    """Clock of the processor time of all threads of a process; None if it does not exist."""
    clock = ctypes.c_int()
    failed = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    return None if failed else clock.value


def _goes_on(clock: int) -> bool:
    """Whether the process of a clock still exists."""
    try:
        clock_gettime_ns(clock)
    except OSError:
        return False
    return True


class ProgramTime:
    """How long the program computes, and how long others run in place of its thread meanwhile.

    It begins stopped.
    """

    def __init__(self) -> None:
        self.computed_ns = 0
        self.interrupted_ns = 0
        self._since: tuple[int, int, int] | None = None

    def go(self) -> None:
        """Note that the program runs."""
        self._since = *moment(), threading.get_ident()

    def stop(self, at: tuple[int, int] | None = None) -> None:
        """Note that the program stops; safe to call again.

        Time is counted up to ``at``, a :func:`moment` (None: up to now).
        """
        if self._since is None:
            return
        began_ns, own_ns, thread = self._since
        self._since = None
        now_ns, thread_ns = at or moment()
        elapsed_ns = now_ns - began_ns
        if thread == threading.get_ident():
            # The two clocks are read one after the other, so own time may come out longer.
            own_ns = min(thread_ns - own_ns, elapsed_ns)
        else:  # another thread stops it: who ran meanwhile is not known
            own_ns = elapsed_ns
        self.computed_ns += own_ns
        self.interrupted_ns += elapsed_ns - own_ns

    def waiting_since(self, load: CommunicationLoad) -> Callable[[], int]:
        """Return a function that gives how much time (ns) since now was waiting for ``load``.

        See [Note: interruptions]. Call both while the program is stopped.
        """
        if not load.interrupts:
            return lambda: 0
        computed_ns, interrupted_ns = self.computed_ns, self.interrupted_ns

        def waiting_ns() -> int:
            interrupted = self.interrupted_ns - interrupted_ns
            return max(0, interrupted - (self.computed_ns - computed_ns))

        return waiting_ns
