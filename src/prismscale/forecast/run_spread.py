"""How the step varies between runs, and between the steps of one run.

A run keeps its devices and links; another run of the same job gets others. A log shows the steps of
one run; a plan has to consider the steps of all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from prismscale.forecast.draws.montecarlo import Draws

SPREAD = (0.5, 0.95)
"""Quantiles whose distance is divided among the sources of variation."""
LOG_STEPS = 250
"""Steps of a log where the user does not say: about an hour of a large job."""
LOGS = 1_000
"""Number of logs that are composed of drawn steps."""
LOG_ENDS = (0.05, 0.95)
"""Quantiles of the coefficient of variation (CV) of logs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSpread:
    """Variation that a log of some steps of one run shows.

    A rare long stall is in some logs and not in others. So no log shows the CV over all drawn
    steps: most logs show less, a few much more.
    """

    steps: int
    cv: float
    """CV of the median log."""
    cv_low: float
    cv_high: float
    """CVs that one log in twenty, and all but one in twenty, stay below."""
    p95: float
    """How far a log's p95 lies above its median, as a share: the median over logs."""

    @classmethod
    def of(cls, step_ns_AT: NDArray[np.int64], steps: int) -> LogSpread:
        """Compute the spread from drawn runs (A) of several steps (T) each.

        Logs are composed at random of all steps, each taken around its own run's median. (Around
        the mean, one stall would move the other steps.)
        """
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
    """Return the standard deviation of ``of`` standard normal variables around their own median.

    It is estimated by drawing them: 0.96 for eight.
    """
    drawn = np.random.default_rng(0).standard_normal((40_000, of))
    return float((drawn - np.median(drawn, axis=1, keepdims=True)).std())


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpread:
    """Coefficients of variation (CV) of the step, within and between runs."""

    within_cv: float
    """CV from step to step of one run."""
    between_cv: float
    """CV of the mean step from run to run."""
    within_p95: float
    """How far the p95 of the steps of one run lies above their median, as a share."""
    log: LogSpread
    """Variation that the log of one run shows."""

    @classmethod
    def of(cls, step_ns_AT: NDArray[np.int64], log_steps: int = LOG_STEPS) -> RunSpread:
        """Compute the spread from drawn runs (A) of several steps (T) each."""
        steps = step_ns_AT.shape[1]
        mean = float(step_ns_AT.mean())
        within = float(step_ns_AT.var(axis=1, ddof=1).mean())
        between = max(float(step_ns_AT.mean(axis=1).var(ddof=1)) - within / steps, 0.0)
        # Steps around their run's mean, scaled up for the part of their deviation that the mean
        # takes.
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
    """Effect of one source of variation on a forecast."""

    name: str
    share: float
    """Share of p95 - p50: 1 minus the square of the fraction of it that is left without the source.
    Independent sources add up in squares, so shares add up to about 1."""
    p50_ns: float
    """p50 of the step without the source."""


def variation_shares(
    draw: Callable[[str | None], Draws], names: Sequence[str]
) -> tuple[VariationShare, ...]:
    """Return the share of every source, from the same draws without it.

    Args:
        draw: returns draws without the source of this name; None: with all of them.
    """
    p50, p95 = np.quantile(draw(None).step_ns_D, SPREAD)
    found = []
    for name in names:
        own_p50, own_p95 = np.quantile(draw(name).step_ns_D, SPREAD)
        share = 1 - ((own_p95 - own_p50) / (p95 - p50)) ** 2 if p95 > p50 else 0.0
        found.append(VariationShare(name=name, share=float(share), p50_ns=float(own_p50)))
    return tuple(found)
