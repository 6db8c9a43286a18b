"""How long a whole training takes on machines that vary, fail, and are replaced.

The simulated law: work is done in segments, each followed by a checkpoint that blocks. The job
fails at random (a Poisson process of all its nodes). It loses the work since its last checkpoint
and begins again after a restart, during which it may fail too. Some failures take a node out. A
spare node takes its place, or the job waits until the first node in repair comes back.

Times are in seconds, except for step times, which are in nanoseconds as everywhere.

Array axes: ``D`` draws of the whole training, ``A`` runs (allocations), ``S`` spare nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import UsageError
from prismscale.forecast.fleet import Fleet

Floats = NDArray[np.float64]

DAY_S = 86_400.0
MOST_FAILURES = 200_000
"""Largest number of failures of one training. With more, the job makes no progress."""
INTERVALS = 2.0 ** np.arange(-3.0, 3.25, 0.25)
"""Multiples of Daly's interval among which the simulated law's best interval is looked for."""
INTERVAL_DRAWS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """A training on machines that fail."""

    steps: int
    extra_ns: float = 0.0
    """Time that periodic events add to a step on average, without checkpoints."""
    nodes: int = 1
    fleet: Fleet | None = None
    """How often nodes fail. None: never."""
    checkpoint_s: float = 60.0
    """Time that writing a checkpoint costs."""
    restart_s: float = 600.0
    """Time from a failure to the first step that continues from the last checkpoint."""
    replace_s: float = 0.0
    """Time that putting in another node adds to a restart."""
    spares: int | None = None
    """Number of nodes that stand ready. None: always enough."""
    repair_hours: float = 24.0
    """Time until a node that was taken out is a spare again."""
    interval_s: float | None = None
    """Work between checkpoints. None: Daly's optimum."""

    def __post_init__(self) -> None:
        positive = {"steps": self.steps, "nodes": self.nodes, "checkpoint_s": self.checkpoint_s}
        if self.interval_s is not None:
            positive["interval_s"] = self.interval_s
        for name, value in positive.items():
            if not value > 0:
                raise UsageError(f"{name} is {value}; it must be more than 0")
        for name in ("restart_s", "replace_s", "repair_hours"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.spares is not None and self.spares < 1:
            raise UsageError(
                f"spares is {self.spares}; a job that loses a node needs 1 or more to go on"
            )

    @property
    def job_mtbf_s(self) -> float:
        """Mean time between failures of the job: any node's failure stops it."""
        return np.inf if self.fleet is None else self.fleet.node_mtbf_hours * 3600 / self.nodes

    @property
    def checkpoint_interval_s(self) -> float:
        """Work between checkpoints: the given interval, or Daly's optimum."""
        if self.interval_s is not None:
            return self.interval_s
        return daly_interval_s(self.checkpoint_s, self.job_mtbf_s)


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the first-order optimum √(2 C M) (Young, CACM 17(9), 1974)."""
    return float(np.sqrt(2 * checkpoint_s * mtbf_s))


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the higher-order optimum of the interval between checkpoints.

    Source: Daly, Future Generation Computer Systems 22(3), 2006, equation 37.
    """
    if np.isinf(mtbf_s):
        return np.inf
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    x = checkpoint_s / (2 * mtbf_s)
    return float(np.sqrt(2 * checkpoint_s * mtbf_s) * (1 + np.sqrt(x) / 3 + x / 9) - checkpoint_s)


@dataclass(frozen=True, kw_only=True)
class TrainingTime:
    """How long a training takes, and where the time goes: times are in days, by draw."""

    days_D: Floats
    failures_D: NDArray[np.int64]
    steps_D: Floats
    """Time of steps that were not undone, with periodic events and without checkpoints."""
    checkpoints_D: Floats
    """Time of writing checkpoints that were not undone."""
    redone_D: Floats
    """Time of work and checkpoints that a failure undid."""
    down_D: Floats
    """Time of restarts, of replacing nodes, and of waiting for one."""
    interval_s: float
    """Work between checkpoints."""

    def days(self, q: float) -> float:
        """Return a quantile of the days."""
        return float(np.quantile(self.days_D, q))


def training_time(
    step_ns_AT: NDArray[np.int64], plan: TrainingPlan, *, draws: int = 1_000, seed: int = 0
) -> TrainingTime:
    """Draw the time to finish a plan.

    Args:
        step_ns_AT: step times of drawn runs (A), of several steps (T) each; ``[D]`` where every
            step is a run by itself. A training keeps its run's devices, so its mean step is that of
            one run. The sum of its steps is a normal variable (central limit theorem).

    Raises:
        UsageError: there are no draws, or the job fails so often that it never finishes.
    """
    if step_ns_AT.size == 0:
        raise UsageError("no draws of the step time")
    rng = np.random.default_rng(seed)
    mean_D, std_s = _mean_steps(step_ns_AT, rng, draws)
    work_D = (mean_D + plan.extra_ns / 1e9) * plan.steps
    work_D = np.maximum(work_D + rng.normal(0.0, std_s * np.sqrt(plan.steps), draws), 0.0)
    return _Law(plan=plan, work_D=work_D, interval_s=plan.checkpoint_interval_s).run(rng)


def best_interval_s(work_s: float, plan: TrainingPlan, *, seed: int = 0) -> float:
    """Return the work between checkpoints with which the simulated training is shortest on average.

    All intervals are tried with the same failures.

    Raises:
        UsageError: nothing fails, so that the longest interval is the best; or the job never
            finishes.
    """
    daly_s = daly_interval_s(plan.checkpoint_s, plan.job_mtbf_s)
    if np.isinf(daly_s):
        raise UsageError("nothing fails: no checkpoint is needed")
    work_D = np.full(INTERVAL_DRAWS, work_s)
    tried = {}
    for interval_s in (daly_s * INTERVALS).tolist():
        rng = np.random.default_rng(seed)
        try:
            law = _Law(plan=plan, work_D=work_D, interval_s=interval_s).run(rng)
        except UsageError:
            continue  # the interval is so long that no segment ends
        tried[interval_s] = float(law.days_D.mean())
    if not tried:
        raise UsageError("the job fails before any checkpoint: it never finishes")
    return min(tried, key=lambda interval_s: tried[interval_s])


def _mean_steps(
    step_ns_AT: NDArray[np.int64], rng: np.random.Generator, draws: int
) -> tuple[Floats, float]:
    """Return the mean step of a run, by draw, and the standard deviation of one step within a run.

    Both are in seconds.
    """
    if step_ns_AT.ndim == 1:
        return np.full(draws, step_ns_AT.mean() / 1e9), float(step_ns_AT.std()) / 1e9
    steps = step_ns_AT.shape[1]
    mean_A = step_ns_AT.mean(axis=1) / 1e9
    if len(mean_A) == 1 or steps == 1:
        return np.full(draws, mean_A.mean()), float(step_ns_AT.std()) / 1e9
    within = float((step_ns_AT / 1e9).var(axis=1, ddof=1).mean())
    observed = float(mean_A.var(ddof=1))
    # A mean over few steps varies more than the run's true mean.
    true = max(observed - within / steps, 0.0)
    shrunk = np.sqrt(true / observed) if observed else 0.0
    picked = mean_A[rng.integers(0, len(mean_A), draws)]
    return mean_A.mean() + (picked - mean_A.mean()) * shrunk, float(np.sqrt(within))


@dataclass(kw_only=True)
class _Law:
    """One simulation of the law. All draws go from failure to failure together."""

    plan: TrainingPlan
    work_D: Floats
    interval_s: float

    def run(self, rng: np.random.Generator) -> TrainingTime:
        plan, draws = self.plan, len(self.work_D)
        mtbf_s = plan.job_mtbf_s
        segments_D = np.maximum(np.ceil(self.work_D / self.interval_s), 1)
        # Segments are equal, because a short last one would cost as much as a long one.
        length_D = self.work_D / segments_D
        checkpoints_D = plan.checkpoint_s * (segments_D - 1)
        redone_D, down_D = np.zeros(draws), np.zeros(draws)
        failures_D = np.zeros(draws, dtype=np.int64)
        if np.isfinite(mtbf_s):
            self._check(float(length_D.max()), mtbf_s)
            failures_D = self._failing(rng, segments_D, length_D, redone_D, down_D)
        days = [a / DAY_S for a in (self.work_D, checkpoints_D, redone_D, down_D)]
        return TrainingTime(
            days_D=np.sum(days, axis=0),
            failures_D=failures_D,
            steps_D=days[0],
            checkpoints_D=days[1],
            redone_D=days[2],
            down_D=days[3],
            interval_s=float(self.interval_s),
        )

    def _check(self, length_s: float, mtbf_s: float) -> None:
        plan = self.plan
        attempt_s = plan.restart_s + length_s + plan.checkpoint_s
        if attempt_s / mtbf_s > np.log(MOST_FAILURES):
            raise UsageError(
                f"the job fails every {mtbf_s:,.0f} s and needs {attempt_s:,.0f} s to restart and "
                "get to its next checkpoint: it never finishes; checkpoint more often "
                "(--interval-s), or restart faster (--restart-s)"
            )

    def _failing(
        self,
        rng: np.random.Generator,
        segments_D: Floats,
        length_D: Floats,
        redone_D: Floats,
        down_D: Floats,
    ) -> NDArray[np.int64]:
        """Simulate all failures and return their number.

        Their cost is added to ``redone_D`` and ``down_D``.
        """
        plan, mtbf_s = self.plan, self.plan.job_mtbf_s
        left_D = segments_D.copy()
        restart_D, clock_D = np.zeros_like(length_D), np.zeros_like(length_D)
        count_D = np.zeros(len(length_D), dtype=np.int64)
        spares = _Spares(plan, len(length_D))
        alive = np.arange(len(length_D))
        while len(alive):
            if count_D.max() > MOST_FAILURES:
                raise UsageError(f"more than {MOST_FAILURES:,} failures: the job hardly gets on")
            lives = rng.exponential(mtbf_s, len(alive))
            cycle = length_D[alive] + plan.checkpoint_s
            # The last segment ends the training without a checkpoint.
            needed = restart_D[alive] + cycle * left_D[alive] - plan.checkpoint_s
            done = lives >= needed
            clock_D[alive] += np.minimum(lives, needed)
            down_D[alive] += np.minimum(restart_D[alive], lives)
            ran = np.maximum(lives - restart_D[alive], 0.0)
            kept = np.where(done, 0.0, np.floor(ran / cycle))
            redone_D[alive] += np.where(done, 0.0, ran - kept * cycle)
            left_D[alive] -= kept
            alive = alive[~done]
            count_D[alive] += 1
            takes_node = rng.random(len(alive)) < (plan.fleet.replacing_share if plan.fleet else 0)
            waits = spares.taken(alive[takes_node], clock_D[alive[takes_node]])
            # While the job waits for a node, nothing runs that could fail.
            idle = np.where(takes_node, plan.replace_s, 0.0)
            idle[takes_node] += waits
            down_D[alive] += idle
            clock_D[alive] += idle
            restart_D[alive] = plan.restart_s
        return count_D


class _Spares:
    """Spare nodes of every draw. A node that was taken is away for as long as a repair takes."""

    def __init__(self, plan: TrainingPlan, draws: int) -> None:
        self._repair_s = plan.repair_hours * 3600
        self._ready_DS = None if plan.spares is None else np.zeros((draws, plan.spares))

    def taken(self, draws: NDArray[np.int64], now: Floats) -> Floats:
        """Take one spare node in each of these draws, and return how long each draw waits."""
        if self._ready_DS is None:
            return np.zeros(len(draws))
        first = self._ready_DS[draws].argmin(axis=1)
        waits = np.maximum(self._ready_DS[draws, first] - now, 0.0)
        self._ready_DS[draws, first] = now + waits + self._repair_s
        return waits
