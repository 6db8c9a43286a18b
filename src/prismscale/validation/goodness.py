"""How close a forecast distribution is to a measured one, and how close it could be at best.

Two halves of one measured series differ, too, by sampling alone. A forecast is compared with that
*floor*, because a fixed bar on the KS distance of twenty steps can be neither met nor missed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import UsageError

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Errors of a forecast; ``median``, ``p95`` and ``p99`` are relative to the measured value."""

    ks: float
    """KS distance of the two samples."""
    centred_ks: float
    """KS distance after each sample is divided by its own median."""
    median: float
    """Median of the forecast over the measured median, minus 1."""
    p95: float
    p99: float


def ks_two_sample(a: Floats, b: Floats) -> float:
    """Return the largest gap between two empirical CDFs."""
    a, b = np.sort(a), np.sort(b)
    both = np.concatenate([a, b])
    gap = np.searchsorted(a, both, side="right") / len(a)
    gap -= np.searchsorted(b, both, side="right") / len(b)
    return float(np.abs(gap).max())


def agreement(forecast: Floats, measured: Floats) -> Agreement:
    """Compare two samples of step times.

    Raises:
        UsageError: one of the samples is empty.
    """
    if len(forecast) == 0 or len(measured) == 0:
        raise UsageError(f"{len(forecast)} forecast and {len(measured)} measured steps to compare")
    at = np.array([0.5, 0.95, 0.99])
    ours, theirs = np.quantile(forecast, at), np.quantile(measured, at)
    errors = ours / theirs - 1
    return Agreement(
        ks=ks_two_sample(forecast, measured),
        centred_ks=ks_two_sample(forecast / ours[0], measured / theirs[0]),
        median=float(errors[0]),
        p95=float(errors[1]),
        p99=float(errors[2]),
    )


def random_halves(
    n: int, *, splits: int, seed: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return ``splits`` random ways to cut ``n`` steps into two halves, as sorted indices.

    Raises:
        UsageError: there are fewer than two steps.
    """
    if n < 2:
        raise UsageError(f"{n} steps cannot be split into halves; record at least 2")
    rng = np.random.default_rng(seed)
    halves = []
    for _ in range(splits):
        order = rng.permutation(n)
        halves.append((np.sort(order[: n // 2]), np.sort(order[n // 2 :])))
    return halves
