"""The scale rule: how step-time distributions change when the job grows.

There are two rules. :func:`widest_of` is order statistics: a step that ends at a barrier over
``width`` replicas lasts as long as the slowest replica, so its CDF is that of one replica to the
power ``width``. :func:`carry_over` takes the *measured* spread of a job to a layout whose step is
longer or shorter. Slow drift (clocks, temperature, expert load) comes from the computation and
grows with the step. Fast jitter from step to step (data loading, synchronisation) comes once per
step and does not grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from prismscale.errors import UsageError
from prismscale.forecast.distributions.duration_distribution import DurationDistribution, Empirical

Floats = NDArray[np.float64]

DRIFT_WINDOW = 9
"""Number of steps in the running median that separates drift from jitter."""


@dataclass(frozen=True, kw_only=True)
class MaximumOf:
    """Distribution of the largest of ``width`` independent draws.

    It is a :class:`DurationDistribution` itself.
    """

    one: DurationDistribution
    width: float

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return self.quantile(rng.random(shape))

    def quantile(self, q: Floats) -> Floats:
        # F(x)^width = q where F(x) = q^(1/width).
        return self.one.quantile(np.asarray(q, dtype=np.float64) ** (1 / self.width))

    def cdf(self, x: Floats) -> Floats:
        return np.asarray(self.one.cdf(x) ** self.width)


def widest_of(one: DurationDistribution, width: float) -> DurationDistribution:
    """Return the distribution of the slowest of ``width`` independent replicas.

    Given the distribution at one data-parallel width, this is the one at ``width`` times as many
    replicas. It is exact where replicas meet only at the end of the step and draw independently.
    Where they share something (a regime, a collective drawn once), their times are positively
    associated and the quantiles are upper bounds. A quantile ``q`` needs the distribution at
    ``q^(1/width)``: far fewer draws than ``width / (1 - q)`` cannot resolve it.

    Raises:
        UsageError: ``width`` is below 1.
    """
    if width < 1:
        raise UsageError(f"width is {width}; a maximum needs at least 1 replica")
    return one if width == 1 else MaximumOf(one=one, width=width)


@dataclass(frozen=True, kw_only=True, slots=True)
class TailAtWidth:
    """Quantiles of the step time at one data-parallel width."""

    width: float
    """Number of replicas, as a multiple of the number that was drawn."""
    p50_ns: float
    p95_ns: float
    p99_ns: float
    resolved: bool
    """Whether the draws reach far enough into the tail for the p95."""


def tail_growth(step_ns_D: NDArray[np.int64], widths: Sequence[float]) -> list[TailAtWidth]:
    """Return the step time with more replicas, by order statistics from draws at this width.

    Raises:
        UsageError: there are no draws, or a width is below 1.
    """
    if len(step_ns_D) == 0:
        raise UsageError("no draws of the step time")
    distribution = Empirical(sorted_ns=np.sort(step_ns_D.astype(np.float64)))
    found = []
    for width in widths:
        p50, p95, p99 = (
            widest_of(distribution, width).quantile(np.array([0.5, 0.95, 0.99])).tolist()
        )
        beyond = len(step_ns_D) * (1 - 0.95 ** (1 / width))
        found.append(
            TailAtWidth(width=width, p50_ns=p50, p95_ns=p95, p99_ns=p99, resolved=beyond >= 5)
        )
    return found


def carry_over(steps_ns: Floats, median_ns: float) -> Floats:
    """Take measured step times to a layout whose median step is ``median_ns``.

    Drift is the running median over :data:`DRIFT_WINDOW` steps. Its deviation from the median is
    multiplied by the ratio of the medians; the rest is kept as it is.

    Args:
        steps_ns: consecutive measured steps, in order.
        median_ns: median step of the other layout.

    Raises:
        UsageError: there are no steps, or a median is not positive.
    """
    if len(steps_ns) == 0 or median_ns <= 0:
        raise UsageError(f"{len(steps_ns)} steps to carry over to a median of {median_ns} ns")
    here = float(np.median(steps_ns))
    drift = scipy.ndimage.median_filter(
        np.asarray(steps_ns, dtype=np.float64), DRIFT_WINDOW, mode="nearest"
    )
    jitter = steps_ns - drift
    return np.asarray(np.maximum(median_ns + (drift - here) * (median_ns / here) + jitter, 0.0))
