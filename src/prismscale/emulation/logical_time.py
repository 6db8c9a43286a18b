"""``time`` that answers logical time: a program's own timers read what a cluster's would."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Now = Callable[[], int]
"""Logical time in nanoseconds since some origin."""


@contextmanager
def answering_time(now_ns: Now) -> Iterator[None]:
    """Let ``time.time``, ``perf_counter``, ``monotonic`` and their ``_ns`` forms answer logical
    time, continuing from now."""
    real: dict[str, Callable[[], float]] = {}
    for name in ("time", "perf_counter", "monotonic"):
        for suffix, unit in (("", 1e9), ("_ns", 1)):
            original = getattr(time, name + suffix)
            real[name + suffix] = original
            setattr(time, name + suffix, _logical(now_ns, original(), now_ns(), unit))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(time, name, function)


def _logical(now_ns: Now, base: float, began_ns: int, unit: float) -> Callable[[], float]:
    if unit == 1:
        return lambda: int(base) + now_ns() - began_ns
    return lambda: base + (now_ns() - began_ns) / unit
