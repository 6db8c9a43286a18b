"""Lets ``time`` answer logical time.

A program's own timers read what they would on the cluster, and its sleeps are not waited for.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Now = Callable[[], int]
"""Logical time in nanoseconds since some origin."""
LONGEST_SLEEP_S = 0.02
"""Longest real sleep of the program's thread, for which logical time passes: other threads need
some real time to make progress."""
WAITERS = frozenset({"asyncio", "concurrent", "multiprocess", "multiprocessing"})
"""Packages that wait for other processes and threads in real time, and read the clock to check a
timeout. By logical time, which stands still meanwhile, no timeout would ever expire. ``threading``,
``queue`` and ``subprocess`` need no entry: they took their clock from ``time`` when they were
imported."""


@contextmanager
def answering_time(now_ns: Now, pass_ns: Callable[[int], None]) -> Iterator[None]:
    """Let the clocks of ``time`` answer logical time, continuing from now.

    These are ``time.time``, ``perf_counter``, ``monotonic`` and their ``_ns`` forms;
    :data:`WAITERS` read real time. When this thread sleeps, ``pass_ns`` lets as many nanoseconds of
    logical time pass; other threads sleep in real time.
    """
    real: dict[str, Callable[..., Any]] = {"sleep": time.sleep}
    for name in ("time", "perf_counter", "monotonic"):
        for suffix, unit in (("", 1e9), ("_ns", 1)):
            original = getattr(time, name + suffix)
            real[name + suffix] = original
            setattr(time, name + suffix, _logical(now_ns, original, unit))
    time.sleep = _sleep(now_ns, pass_ns, time.sleep)
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(time, name, function)


def _logical(now_ns: Now, real: Callable[[], Any], unit: float) -> Callable[[], Any]:
    base, began_ns = real(), now_ns()

    def answer() -> Any:
        caller: str = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] in WAITERS:
            return real()
        passed_ns = now_ns() - began_ns
        return base + (passed_ns if unit == 1 else passed_ns / unit)

    return answer


def _sleep(
    now_ns: Now, pass_ns: Callable[[int], None], really: Callable[[Any], None]
) -> Callable[[Any], None]:
    program = threading.get_ident()

    def sleep(seconds: Any, /) -> None:
        if threading.get_ident() != program:
            really(seconds)
            return
        began_ns = now_ns()
        really(min(seconds, LONGEST_SLEEP_S))
        # If real time moves this clock too, part of the sleep has already passed.
        pass_ns(max(0, began_ns + round(seconds * 1e9) - now_ns()))

    return sleep
