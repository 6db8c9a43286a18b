"""Guarantees for a step: quantiles with their confidence, and the probability of a slow step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from prismscale.errors import UsageError

LEVEL = 0.95
"""Confidence level of all intervals."""
RESAMPLES = 1_000
RUN_RESAMPLES = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def quantile_estimates(
    step_ns_D: NDArray[np.int64], at: Sequence[float], *, seed: int = 0
) -> dict[float, Estimate]:
    """Return quantiles of the step time in ns, with bootstrap percentile intervals.

    The interval says how much more draws would still change. It does not include that the pools
    themselves are samples.

    Args:
        step_ns_D: step times; ``[A, T]`` for A runs of T steps each: then whole runs are resampled.

    Raises:
        UsageError: there are no draws, or a probability lies outside (0, 1).
    """
    if step_ns_D.size == 0 or any(not 0 < q < 1 for q in at):
        raise UsageError(f"{step_ns_D.size} draws, quantiles {list(at)}: they lie between 0 and 1")
    rng = np.random.default_rng(seed)
    if step_ns_D.ndim == 2 and step_ns_D.shape[1] > 1:
        return _quantiles_of_runs(step_ns_D, at, rng)
    n = step_ns_D.size
    ordered = np.sort(step_ns_D, axis=None)
    found = {}
    for q in at:
        k = min(int(q * n), n - 1)
        # A resample is n uniform positions in ``ordered``; the k-th smallest of n uniforms is a
        # Beta variable.
        ranks = (rng.beta(k + 1, n - k, RESAMPLES) * n).astype(np.int64)
        low, high = np.quantile(ordered[ranks], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        found[q] = Estimate(value=float(np.quantile(ordered, q)), low=float(low), high=float(high))
    return found


def _quantiles_of_runs(
    step_ns_AT: NDArray[np.int64], at: Sequence[float], rng: np.random.Generator
) -> dict[float, Estimate]:
    runs = len(step_ns_AT)
    again_BQ = np.array(
        [np.quantile(step_ns_AT[rng.integers(0, runs, runs)], at) for _ in range(RUN_RESAMPLES)]
    )
    low_Q, high_Q = np.quantile(again_BQ, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    value_Q = np.quantile(step_ns_AT, at)
    return {
        q: Estimate(value=float(value_Q[i]), low=float(low_Q[i]), high=float(high_Q[i]))
        for i, q in enumerate(at)
    }


def slowdown_probability(step_ns_D: NDArray[np.int64], factor: float) -> Estimate:
    """Return P(step > factor × median), with Wilson's score interval.

    Steps of one run are related, so steps ``[A, T]`` of runs count as an equivalent number of
    independent steps (Kish's design effect).

    Raises:
        UsageError: there are no draws, or the factor is not positive and finite.
    """
    if step_ns_D.size == 0 or not 0 < factor < math.inf:
        raise UsageError(
            f"{step_ns_D.size} draws, factor {factor}: it must be finite and more than 0"
        )
    is_slow = step_ns_D > factor * np.median(step_ns_D)
    share = float(is_slow.mean())
    n = max(round(is_slow.size / _design_effect(is_slow)), 1)
    interval = scipy.stats.binomtest(round(share * n), n).proportion_ci(LEVEL, method="wilson")
    return Estimate(value=share, low=float(interval.low), high=float(interval.high))


def _design_effect(is_slow_AT: NDArray[np.bool_]) -> float:
    """Return the variance of a share over that of as many independent steps."""
    share = float(is_slow_AT.mean())
    if is_slow_AT.ndim < 2 or len(is_slow_AT) < 2 or share in (0.0, 1.0):
        return 1.0
    of_runs = float(is_slow_AT.mean(axis=1).var(ddof=1)) / len(is_slow_AT)
    return max(of_runs / (share * (1 - share) / is_slow_AT.size), 1.0)
