"""``time`` that answers logical time: a program's own timers read what a cluster's would, and its
sleeping is not waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Now = Callable[[], int]
"""Logical time in nanoseconds since some origin."""
LONGEST_SLEEP_S = 0.02
"""Of a thread that only logical time passes for: others get on meanwhile."""


@contextmanager
def answering_time(now_ns: Now, pass_ns: Callable[[int], None]) -> Iterator[None]:
    """Let ``time.time``, ``perf_counter``, ``monotonic`` and their ``_ns`` forms answer logical
    time, continuing from now. When this thread sleeps, ``pass_ns`` lets as many nanoseconds of it
    pass; other threads sleep in real time."""
    real: dict[str, Callable[..., Any]] = {"sleep": time.sleep}
    for name in ("time", "perf_counter", "monotonic"):
        for suffix, unit in (("", 1e9), ("_ns", 1)):
            original = getattr(time, name + suffix)
            real[name + suffix] = original
            setattr(time, name + suffix, _logical(now_ns, original(), now_ns(), unit))
    time.sleep = _sleep(now_ns, pass_ns, time.sleep)
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(time, name, function)


def _logical(now_ns: Now, base: float, began_ns: int, unit: float) -> Callable[[], float]:
    if unit == 1:
        return lambda: int(base) + now_ns() - began_ns
    return lambda: base + (now_ns() - began_ns) / unit


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
        # On a clock that real time moves too, some has passed.
        pass_ns(max(0, began_ns + round(seconds * 1e9) - now_ns()))

    return sleep
