"""What differs between runs, and what between the steps of one.

A run keeps its devices and links; another run of the same job gets others. Who looks at a log sees
the steps of one run; who plans looks at all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from prismscale.forecast.draws.montecarlo import Draws

SPREAD = (0.5, 0.95)
"""Quantiles whose distance is shared out among sources."""
LOG_STEPS = 250
"""Of a log, where nobody says: about an hour of a large job."""
LOGS = 1_000
"""Logs that are composed of drawn steps."""
LOG_ENDS = (0.05, 0.95)
"""Of the CV of logs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSpread:
    """What a log of some steps of one run shows.

    A rare long stall is in some logs and not in others, so that the CV over all drawn steps is
    nobody's: most logs show less, a few much more.
    """

    steps: int
    cv: float
    """Of the median log."""
    cv_low: float
    cv_high: float
    """Of one log in twenty, and of all but one in twenty."""
    p95: float
    """How far the p95 of the median log lies above that log's median, as a share."""

    @classmethod
    def of(cls, step_ns_AT: NDArray[np.int64], steps: int) -> LogSpread:
        """From drawn runs (A) of several steps (T) each: logs are composed at random of all steps
        around their own run's median. (Around its mean, one stall would move the other steps.)"""
        off_AT = step_ns_AT - np.median(step_ns_AT, axis=1, keepdims=True)
        around_AT = step_ns_AT.mean() + off_AT / _left_around_median(step_ns_AT.shape[1])
        around_N = around_AT.ravel()
        rng = np.random.default_rng(0)
        log_LT = around_N[rng.integers(0, len(around_N), (LOGS, steps))]
        cv_L = log_LT.std(axis=1, ddof=1) / log_LT.mean(axis=1)
        middle_L, far_L = np.quantile(log_LT, SPREAD, axis=1)
        low, high = np.quantile(cv_L, LOG_ENDS)
        return cls(
            steps=steps,
            cv=float(np.median(cv_L)),
            cv_low=float(low),
            cv_high=float(high),
            p95=float(np.median(far_L / middle_L - 1)),
        )


@lru_cache(maxsize=8)
def _left_around_median(of: int) -> float:
    """Deviation of ``of`` standard normal variables around the median of themselves, by drawing
    them: 0.96 for eight."""
    drawn = np.random.default_rng(0).standard_normal((40_000, of))
    return float((drawn - np.median(drawn, axis=1, keepdims=True)).std())


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpread:
    """Coefficients of variation of the step."""

    within_cv: float
    """From step to step of one run."""
    between_cv: float
    """Of the mean step, from run to run."""
    within_p95: float
    """How far the p95 of the steps of one run lies above their median, as a share."""
    log: LogSpread
    """What somebody sees who has the log of one run."""

    @classmethod
    def of(cls, step_ns_AT: NDArray[np.int64], log_steps: int = LOG_STEPS) -> RunSpread:
        """From drawn runs (A) of several steps (T) each."""
        steps = step_ns_AT.shape[1]
        mean = float(step_ns_AT.mean())
        within = float(step_ns_AT.var(axis=1, ddof=1).mean())
        between = max(float(step_ns_AT.mean(axis=1).var(ddof=1)) - within / steps, 0.0)
        # Steps around their run's mean, which takes a share of their own deviation with it.
        off_AT = step_ns_AT - step_ns_AT.mean(axis=1, keepdims=True)
        around = mean + off_AT * np.sqrt(steps / (steps - 1))
        middle, far = np.quantile(around, SPREAD)
        return cls(
            within_cv=float(np.sqrt(within)) / mean,
            between_cv=float(np.sqrt(between)) / mean,
            within_p95=float(far / middle - 1),
            log=LogSpread.of(step_ns_AT, log_steps),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class VariationShare:
    """What one source of variation does to a forecast."""

    name: str
    share: float
    """Of p95 - p50: 1 minus the square of what is left of it without the source. Independent
    sources add up in squares, so that shares add up to about 1."""
    p50_ns: float
    """Of the step without it."""


def variation_shares(
    draw: Callable[[str | None], Draws], names: Sequence[str]
) -> tuple[VariationShare, ...]:
    """The share of every source, from the same draws without it.

    Args:
        draw: draws without the source of this name; None: with all of them.
    """
    p50, p95 = np.quantile(draw(None).step_ns_D, SPREAD)
    found = []
    for name in names:
        own_p50, own_p95 = np.quantile(draw(name).step_ns_D, SPREAD)
        share = 1 - ((own_p95 - own_p50) / (p95 - p50)) ** 2 if p95 > p50 else 0.0
        found.append(VariationShare(name=name, share=float(share), p50_ns=float(own_p50)))
    return tuple(found)
