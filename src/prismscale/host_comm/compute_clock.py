"""What of the time between two calls was the program's computation.

[Note: interruptions] gloo's threads run on the core of the thread that woke them, often for a whole
time slice: a loop thread spins as long as the worker that holds its lock is not running. What they
take from a computation that goes on beside them is the computation's. A program that waits soon
after the issue is waiting already while they run in its place: that time belongs to the
communication, whose work it is. Counted as computation, and replayed beside other steps'
communications, it made a tensor-parallel step 8 % too long. So where a program is interrupted for
longer than it computed between issue and wait, the excess is waiting, in captures as in live ranks.
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
    """Now, on the monotonic clock and on that of this thread."""
    return perf_counter_ns(), thread_time_ns()


def since_call_ns(batch: Sequence[Collective], load: CommunicationLoad) -> int:
    """How long ago the program called, where ``load`` is work on its core: what the call has taken
    since is no computation. 0 elsewhere, and where the moment is not known."""
    called_ns = batch[0].called_ns
    return perf_counter_ns() - called_ns if called_ns and load.interrupts else 0


class RunQueue:
    """Time that this thread was runnable but not running, in ns, from
    ``/proc/thread-self/schedstat``.

    At most the processor time that the emulation's other processes took meanwhile: a real rank is
    delayed too, by its own threads and by a CPU quota that is used up. 0 on systems without
    schedstat.
    """

    def __init__(self, others: Iterable[int] = ()) -> None:
        """``others``: processes that emulation runs beside this one."""
        self._thread = threading.get_ident()
        clocks = (_processor_clock(other) for other in others)
        self._others = [clock for clock in clocks if clock is not None]
        self._file: int | None = None
        self._since: tuple[int, int] | None = None
        if self._others:
            with suppress(OSError):
                # Resolved as it is opened: the file stays that of this thread.
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def go(self) -> None:
        """The thread runs."""
        self._since = self._now()

    def delayed_ns(self) -> int:
        """Since :meth:`go`; asked by the thread itself."""
        since, now = self._since, self._now()
        if since is None or now is None:
            return 0
        return min(now[0] - since[0], now[1] - since[1])

    def _now(self) -> tuple[int, int] | None:
        """Delay of the thread, and processor time of the other processes."""
        if self._file is None or threading.get_ident() != self._thread:
            return None
        try:
            ran_ns = sum(map(clock_gettime_ns, self._others))
        except OSError:  # one has ended, and what it ran is not known
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
    """The clock of what all threads of a process run; None where there is no such process."""
    clock = ctypes.c_int()
    failed = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    return None if failed else clock.value


def _goes_on(clock: int) -> bool:
    """Whether the process of a clock has not ended."""
    try:
        clock_gettime_ns(clock)
    except OSError:
        return False
    return True


class ProgramTime:
    """What the program computes, and how long others run in place of its thread meanwhile. It
    begins stopped."""

    def __init__(self) -> None:
        self.computed_ns = 0
        self.interrupted_ns = 0
        self._since: tuple[int, int, int] | None = None

    def go(self) -> None:
        """The program runs."""
        self._since = *moment(), threading.get_ident()

    def stop(self, at: tuple[int, int] | None = None) -> None:
        """The program stops. What it did is counted up to a :func:`moment` (None: up to now). Safe
        to call again."""
        if self._since is None:
            return
        began_ns, own_ns, thread = self._since
        self._since = None
        now_ns, thread_ns = at or moment()
        elapsed_ns = now_ns - began_ns
        if thread == threading.get_ident():
            # The two clocks are read one after the other, so own time may come out longer.
            own_ns = min(thread_ns - own_ns, elapsed_ns)
        else:  # whose time that was is not known
            own_ns = elapsed_ns
        self.computed_ns += own_ns
        self.interrupted_ns += elapsed_ns - own_ns

    def waiting_since(self, load: CommunicationLoad) -> Callable[[], int]:
        """A function that tells how much of the time (ns) since now was waiting for what ``load``
        does: see [Note: interruptions]. Call both while the program is stopped."""
        if not load.interrupts:
            return lambda: 0
        computed_ns, interrupted_ns = self.computed_ns, self.interrupted_ns

        def waiting_ns() -> int:
            interrupted = self.interrupted_ns - interrupted_ns
            return max(0, interrupted - (self.computed_ns - computed_ns))

        return waiting_ns
