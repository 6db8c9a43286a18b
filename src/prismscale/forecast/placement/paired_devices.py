"""How fast devices of one machine run ranks of a job, compared with each other and recorded steps.

Two ranks of the job run live on two devices at a time. Each device runs both of them in turn, so
that a difference between the ranks makes no device look slower (PrismLLM checks pairs of GPUs in
this way).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prismscale.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One run of a rank on a device."""

    device: int
    rank: int
    computed_ns: int
    """Median computation time of a step, without waits."""
    recorded_ns: int
    """The same for the rank's recorded steps."""
    step_ns: int
    """Step time of the job with this pair of devices."""

    @property
    def factor(self) -> float:
        """Factor on computation time: 1.1 is 10 % slower than recorded."""
        return self.computed_ns / self.recorded_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeed:
    """Speed of a device over all its turns."""

    device: int
    turns: tuple[Turn, ...]
    is_slow: bool

    @property
    def factor(self) -> float:
        """Mean of :attr:`Turn.factor` over both ranks."""
        return _factor(self.turns)

    @property
    def step_ns(self) -> int:
        """Longest step time of the job with this device."""
        return max(turn.step_ns for turn in self.turns)


def pairs(devices: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs of neighbours in a ring: each device is first once, and second once.

    Raises:
        UsageError: fewer than two devices, or one of them twice.
    """
    if len(devices) < 2 or len(set(devices)) < len(devices):
        raise UsageError(
            f"devices {', '.join(map(str, devices)) or 'none'}: give two or more, each once; "
            "a single device has none to be held against (prismscale health times it)"
        )
    return list(zip(devices, [*devices[1:], devices[0]], strict=True))


def device_speeds(turns: Iterable[Turn], tolerance: float) -> tuple[DeviceSpeed, ...]:
    """Return the speed of each device.

    A device is slow if its factor is more than ``tolerance`` (0.05: 5 %) above the median of the
    others.
    """
    by_device: dict[int, list[Turn]] = {}
    for turn in turns:
        by_device.setdefault(turn.device, []).append(turn)
    factors = {device: _factor(found) for device, found in by_device.items()}

    def is_slow(device: int) -> bool:
        others = [factor for other, factor in factors.items() if other != device]
        return bool(others) and factors[device] > statistics.median(others) * (1 + tolerance)

    return tuple(
        DeviceSpeed(device=device, turns=tuple(found), is_slow=is_slow(device))
        for device, found in sorted(by_device.items())
    )


def _factor(turns: Sequence[Turn]) -> float:
    return statistics.fmean(turn.factor for turn in turns)
