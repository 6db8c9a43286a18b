"""Which device is slow, of what ranks took on each."""

from __future__ import annotations

import pytest

from prismscale.errors import UsageError
from prismscale.forecast.placement.paired_devices import Turn, device_speeds, pairs


def turn(device: int, rank: int, factor: float) -> Turn:
    recorded = 1_000 * (rank + 1)
    return Turn(
        device=device,
        rank=rank,
        computed_ns=round(factor * recorded),
        recorded_ns=recorded,
        step_ns=10_000,
    )


def test_each_device_has_both_ranks_in_turn() -> None:
    """Once as the first of a pair, once as the second."""
    assert pairs((4, 5, 7)) == [(4, 5), (5, 7), (7, 4)]


@pytest.mark.parametrize("devices", [(), (3,), (1, 2, 1)])
def test_a_device_is_held_against_others(devices: tuple[int, ...]) -> None:
    """One alone, or beside itself, says nothing."""
    with pytest.raises(UsageError, match="two or more"):
        pairs(devices)


@pytest.mark.parametrize("everywhere", [1.0, 1.4])
def test_the_one_that_is_slower_than_the_others_is_named(everywhere: float) -> None:
    """Even if all are slower than what was recorded."""
    turns = [turn(d, r, everywhere * (1.3 if d == 2 else 1.0)) for d in range(4) for r in (0, 1)]
    found = device_speeds(turns, 0.05)
    assert [speed.device for speed in found if speed.is_slow] == [2]
    assert found[2].factor == pytest.approx(1.3 * everywhere)


def test_differences_below_the_tolerance_name_nobody() -> None:
    """4 % is what devices of one kind may differ by."""
    turns = [turn(0, 0, 1.04), turn(0, 1, 1.04), turn(1, 0, 1.0), turn(1, 1, 1.0)]
    assert not any(speed.is_slow for speed in device_speeds(turns, 0.05))
