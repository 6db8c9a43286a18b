"""The figures of a point, read off its run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prismscale.analysis.job_work import JobWork, job_work
from prismscale.analysis.result import RunResult, StageResult
from prismscale.api import load
from prismscale.durations.scenario import Scenario
from prismscale.explore.outcome import Outcome, Status
from prismscale.report.remarks import highest_peak_bytes, job_shares
from prismscale.runfolder import RunFolder

DRAWS = 200
"""Enough for the 95th percentile of what is compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What is asked of every point beside its run."""

    draws: int = DRAWS
    seed: int = 0
    tokens_per_step: int = 0
    """Of the whole job; 0: as found."""


def figures(folder: Path, key: str, asked: Asked) -> Outcome:
    """The outcome of a finished run.

    Raises:
        PrismscaleError: any of its kinds: files that cannot be read, or a job without a step.
    """
    run = load(folder)
    result = run.result
    forecast = run.forecast(draws=asked.draws, seed=asked.seed)
    p50, p95 = np.quantile(forecast.step_ns_D, [0.5, 0.95])
    scenario = Scenario.load(RunFolder(root=folder).scenario)
    work = JobWork()
    if scenario.kernel_costs is not None:
        work = job_work(run.graph, folder / scenario.captures)
    tokens = asked.tokens_per_step or work.tokens
    peak = scenario.cluster.device.peak_flops.get(work.dtype)
    shares = job_shares(result)
    fullest = _fullest(result)
    return Outcome(
        key=key,
        status=Status.DONE,
        world_size=result.world_size,
        cluster=result.cluster,
        step_ns=result.step_ns,
        p50_ns=round(p50),
        p95_ns=round(p95),
        tokens_per_step=tokens or None,
        tokens_given=bool(asked.tokens_per_step),
        mfu=_utilisation(work, peak, result),
        peak_bytes=highest_peak_bytes(result),
        reserved_bytes=max(
            (s.reserved_bytes for s in result.stages if s.reserved_bytes is not None), default=None
        ),
        held_bytes=None if fullest is None else _held(fullest),
        memory_bytes=None if fullest is None else scenario.cluster.device.memory_bytes,
        computation=shares["computation"],
        exposed=shares["communication"],
        bubble=shares["bubble"],
        skew=shares["skew"],
        captured=len(result.captured),
    )


def _utilisation(work: JobWork, peak_flops: float | None, result: RunResult) -> float | None:
    if not work.flops or not peak_flops or not result.step_ns:
        return None
    return work.flops / (peak_flops * result.world_size * result.step_ns / 1e9)


def _fullest(result: RunResult) -> StageResult | None:
    """The stage whose GPU is fullest, where an allocator was followed."""
    followed = [s for s in result.stages if s.reserved_bytes is not None]
    return max(followed, key=_held, default=None)


def _held(stage: StageResult) -> int:
    return (stage.reserved_bytes or 0) + stage.outside_bytes
