"""``time`` that answers logical time."""

from __future__ import annotations

import time

import pytest

from prismscale.emulation.logical_time import answering_time


@pytest.mark.parametrize("name", ["time", "perf_counter", "monotonic"])
def test_timers_move_with_logical_time_only(name: str) -> None:
    """Seconds and nanoseconds, continuing from where they were, and real again afterwards."""
    original, now = getattr(time, name), [5]
    with answering_time(lambda: now[0]):
        began, began_ns = getattr(time, name)(), getattr(time, f"{name}_ns")()
        now[0] += 2_000_000_000
        assert getattr(time, name)() == pytest.approx(began + 2)
        assert getattr(time, f"{name}_ns")() == began_ns + 2_000_000_000
    assert getattr(time, name) is original
