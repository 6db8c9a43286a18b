"""The figures of a point, computed from its run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prismscale.analysis.answers import fit_of, utilisation
from prismscale.api import load
from prismscale.explore.outcome import Outcome, Status
from prismscale.forecast.step_spread import DRAWS, step_spread
from prismscale.report.remarks import highest_peak_bytes, job_shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Options of the figures, the same for every point of a sweep."""

    draws: int = DRAWS
    """Number of Monte Carlo draws."""
    seed: int = 0
    tokens_per_step: int = 0
    """Tokens a step of the whole job; 0: as found in the run."""


def figures(folder: Path, key: str, asked: Asked) -> Outcome:
    """Return the outcome of a finished run.

    Raises:
        PrismscaleError: files cannot be read, or the job has no step; any of its subclasses.
    """
    run = load(folder)
    result = run.result
    spread = result.spread
    if spread is None or (asked.draws, asked.seed) != (spread.draws, 0):
        spread = step_spread(folder, draws=asked.draws, seed=asked.seed)
    tokens = asked.tokens_per_step or result.work.tokens
    shares = job_shares(result)
    fit = fit_of(result)
    return Outcome(
        key=key,
        status=Status.DONE,
        world_size=result.world_size,
        cluster=result.cluster,
        step_ns=result.step_ns,
        p50_ns=spread.p50_ns,
        p95_ns=spread.p95_ns,
        tokens_per_step=tokens or None,
        tokens_given=bool(asked.tokens_per_step),
        mfu=utilisation(result, result.work.flops, spread.p50_ns),
        peak_bytes=highest_peak_bytes(result),
        reserved_bytes=max(
            (s.reserved_bytes for s in result.stages if s.reserved_bytes is not None), default=None
        ),
        held_bytes=fit.held_bytes if fit else None,
        memory_bytes=fit.capacity_bytes if fit else None,
        computation=shares["computation"],
        exposed=shares["communication"],
        bubble=shares["bubble"],
        skew=shares["skew"],
        captured=len(result.captured),
    )
