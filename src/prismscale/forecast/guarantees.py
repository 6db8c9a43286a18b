"""What can be promised: quantiles with their confidence, the chance of a slow step, days to train.

Times in seconds where they are those of people (checkpoints, failures, days), else in ns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from prismscale.errors import UsageError

LEVEL = 0.95
"""Of all confidence intervals."""
RESAMPLES = 1_000
DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def quantile_estimates(
    step_ns_D: NDArray[np.int64], at: Sequence[float], *, seed: int = 0
) -> dict[float, Estimate]:
    """Quantiles of the step time with bootstrap percentile intervals, in ns.

    The interval says what more draws would still change; that the pools themselves are samples is
    not in it.

    Raises:
        UsageError: no draws, or a probability outside (0, 1).
    """
    if len(step_ns_D) == 0 or any(not 0 < q < 1 for q in at):
        raise UsageError(f"{len(step_ns_D)} draws, quantiles {list(at)}: they lie between 0 and 1")
    rng = np.random.default_rng(seed)
    n = len(step_ns_D)
    ordered = np.sort(step_ns_D)
    found = {}
    for q in at:
        k = min(int(q * n), n - 1)
        # A resample is n uniform ranks; the k-th smallest of n uniforms is a Beta variable.
        ranks = (rng.beta(k + 1, n - k, RESAMPLES) * n).astype(np.int64)
        low, high = np.quantile(ordered[ranks], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        found[q] = Estimate(value=float(np.quantile(ordered, q)), low=float(low), high=float(high))
    return found


def slowdown_probability(step_ns_D: NDArray[np.int64], factor: float) -> Estimate:
    """P(step > factor × median), with Wilson's score interval.

    Raises:
        UsageError: no draws, or a factor that is not positive.
    """
    if len(step_ns_D) == 0 or factor <= 0:
        raise UsageError(f"{len(step_ns_D)} draws, factor {factor}: it must be more than 0")
    n = len(step_ns_D)
    slow = int((step_ns_D > factor * np.median(step_ns_D)).sum())
    interval = scipy.stats.binomtest(slow, n).proportion_ci(LEVEL, method="wilson")
    return Estimate(value=slow / n, low=float(interval.low), high=float(interval.high))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """A training run on machines that fail."""

    steps: int
    extra_ns: float = 0.0
    """What periodic events add to a step on average."""
    nodes: int = 1
    mtbf_hours: float | None = None
    """Mean time between failures of one node; None: nothing fails."""
    checkpoint_s: float = 60.0
    """What writing a checkpoint costs."""
    restart_s: float = 600.0
    """From a failure to the first step from the last checkpoint."""
    interval_s: float | None = None
    """Work between checkpoints; None is Daly's optimum."""

    def __post_init__(self) -> None:
        positive = {"steps": self.steps, "nodes": self.nodes, "checkpoint_s": self.checkpoint_s}
        optional = {"mtbf_hours": self.mtbf_hours, "interval_s": self.interval_s}
        positive.update({k: v for k, v in optional.items() if v is not None})
        for name, value in positive.items():
            if not value > 0:
                raise UsageError(f"{name} is {value}; it must be more than 0")
        if self.restart_s < 0:
            raise UsageError(f"restart_s is {self.restart_s}; it must be 0 or more")

    @property
    def job_mtbf_s(self) -> float:
        """Mean time between failures of the job: any node's failure stops it."""
        return np.inf if self.mtbf_hours is None else self.mtbf_hours * 3600 / self.nodes

    @property
    def checkpoint_interval_s(self) -> float:
        """Work between checkpoints that is used."""
        if self.interval_s is not None:
            return self.interval_s
        return daly_interval_s(self.checkpoint_s, self.job_mtbf_s)


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """First-order optimum √(2 C M) (Young, CACM 17(9), 1974)."""
    return float(np.sqrt(2 * checkpoint_s * mtbf_s))


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Higher-order optimum (Daly, Future Generation Computer Systems 22(3), 2006, equation 37)."""
    if np.isinf(mtbf_s):
        return np.inf
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    x = checkpoint_s / (2 * mtbf_s)
    return float(np.sqrt(2 * checkpoint_s * mtbf_s) * (1 + np.sqrt(x) / 3 + x / 9) - checkpoint_s)


@dataclass(frozen=True, kw_only=True)
class TrainingTime:
    """How long a training run takes."""

    days_D: NDArray[np.float64]
    """Draws of the whole."""
    failures_D: NDArray[np.int64]
    without_failures_days: float
    """Mean: steps alone, no checkpoints."""
    interval_s: float
    """Work between checkpoints."""

    def days(self, q: float) -> float:
        """Quantile of the days."""
        return float(np.quantile(self.days_D, q))


def training_time(
    step_ns_D: NDArray[np.int64], plan: TrainingPlan, *, draws: int = 1_000, seed: int = 0
) -> TrainingTime:
    """Draw the time to finish a plan.

    The sum of many steps is normal by the central limit theorem, with the mean and the variance of
    the draws (unrelated steps: a regime that lasts would widen it). Failures are a Poisson process;
    a segment (work and its checkpoint) that fails is begun again after the restart, during which
    the job may fail too.

    Raises:
        UsageError: no draws.
    """
    if len(step_ns_D) == 0:
        raise UsageError("no draws of the step time")
    rng = np.random.default_rng(seed)
    mean_s, std_s = (step_ns_D.mean() + plan.extra_ns) / 1e9, step_ns_D.std() / 1e9
    spread = std_s * np.sqrt(plan.steps)
    work_D = np.maximum(rng.normal(mean_s * plan.steps, spread, draws), 0.0)
    interval_s, mtbf_s = plan.checkpoint_interval_s, plan.job_mtbf_s
    # Work over an infinite interval is 0, which is one segment.
    segments_D = np.maximum(np.ceil(work_D / interval_s), 1).astype(np.int64)
    total_D = work_D + plan.checkpoint_s * (segments_D - 1)
    failures_D = np.zeros(draws, dtype=np.int64)
    if np.isfinite(mtbf_s):
        length = work_D / segments_D + plan.checkpoint_s
        failures_D, lost_D = _failures(rng, segments_D, length, plan.restart_s, mtbf_s)
        total_D = total_D + lost_D
    return TrainingTime(
        days_D=total_D / DAY_S,
        failures_D=failures_D,
        without_failures_days=float(mean_s * plan.steps / DAY_S),
        interval_s=float(interval_s),
    )


def _failures(
    rng: np.random.Generator,
    segments_D: NDArray[np.int64],
    length_D: NDArray[np.float64],
    restart_s: float,
    mtbf_s: float,
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Number of failures, and the time they cost, of every draw."""
    # First attempts begin with work, repeated ones with a restart: they fail at different rates.
    first = rng.binomial(segments_D, -np.expm1(-length_D / mtbf_s))
    again_D = length_D + restart_s
    repeats = np.where(
        first > 0, rng.negative_binomial(np.maximum(first, 1), np.exp(-again_D / mtbf_s)), 0
    )
    lost_D = _lost(rng, first, length_D, mtbf_s) + _lost(rng, repeats, again_D, mtbf_s)
    # The attempt that succeeds pays for its restart too.
    return first + repeats, lost_D + first * restart_s


def _lost(
    rng: np.random.Generator,
    count_D: NDArray[np.int64],
    within_D: NDArray[np.float64],
    mtbf_s: float,
) -> NDArray[np.float64]:
    """Sum of ``count`` failure times, each exponential and before ``within``."""
    owner = np.repeat(np.arange(len(count_D)), count_D)
    reach = -np.expm1(-within_D[owner] / mtbf_s)
    times = -mtbf_s * np.log1p(-rng.random(len(owner)) * reach)
    return np.bincount(owner, weights=times, minlength=len(count_D)).astype(np.float64)
