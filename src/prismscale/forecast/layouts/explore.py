"""Exploring layouts: the step time's p50 and p95 of many ways to cut one job, before it runs.

Graphs are made by rule (:mod:`.layout`) from what one layer costs, or from what a captured run's
stages took (:mod:`.captured`), so a layout takes seconds. What that leaves out: gradients are
reduced after the last backward and not while it runs, and within a stage layers are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from prismscale.cost.collective import CollectiveModel
from prismscale.errors import UsageError, did_you_mean
from prismscale.forecast.draws.executor import Executor
from prismscale.forecast.draws.lockstep import fuse
from prismscale.forecast.draws.montecarlo import Draws, MonteCarlo, draw_steps
from prismscale.forecast.draws.sampling import fuse_distributions
from prismscale.forecast.draws.variation import Variation, vary
from prismscale.forecast.layouts.layout import Layout, PassCosts, build_layout, median_durations
from prismscale.forecast.layouts.schedules import SCHEDULES

INTERLEAVED_CHUNKS = 2


class OpenJob(Protocol):
    """A job whose layout is open."""

    @property
    def variation(self) -> Variation:
        """How unsteady its durations are."""
        ...

    def layout(self, *, tp: int, pp: int, chunks: int, name: str) -> Layout:
        """The layout of these degrees; raises :class:`UsageError` where there is none."""
        ...

    def pass_costs(self, layout: Layout) -> Sequence[PassCosts]:
        """Costs of every model chunk, in the order of the forward pass."""
        ...

    def peak_bytes(self, layout: Layout) -> int | None:
        """Memory of the fullest stage; None where it is not known."""
        ...


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout and what became of it."""

    name: str
    layout: Layout | None
    peak_bytes: int | None = None
    draws: Draws | None = None
    why_not: str = ""
    """Empty where it was forecast."""


def candidates(
    job: OpenJob,
    *,
    tp: Sequence[int],
    pp: Sequence[int],
    schedules: Sequence[str],
    memory_bytes: int,
) -> list[Candidate]:
    """Every combination; those that cannot be say why.

    Raises:
        UsageError: a schedule that does not exist, or a degree below 1.
    """
    for name in schedules:
        if name not in SCHEDULES:
            raise UsageError(f"unknown schedule '{name}'; {did_you_mean(name, SCHEDULES)}")
    if min(*tp, *pp) < 1:
        raise UsageError(f"degrees tp {list(tp)} and pp {list(pp)} must be at least 1")
    return [_candidate(job, t, p, name, memory_bytes) for name in schedules for t in tp for p in pp]


def explore(
    job: OpenJob,
    listed: Sequence[Candidate],
    model: CollectiveModel,
    config: MonteCarlo,
    *,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Candidate]:
    """Forecast every layout that is possible; the fastest p95 first, the impossible last."""
    done = []
    for i, candidate in enumerate(listed):
        if candidate.layout is not None and not candidate.why_not:
            draws = forecast_layout(job, candidate.layout, model, config, executor=executor)
            candidate = replace(candidate, draws=draws)
        done.append(candidate)
        if progress is not None:
            progress(i + 1, len(listed))
    return sorted(done, key=lambda c: c.draws.quantile_ns(0.95) if c.draws else float("inf"))


def forecast_layout(
    job: OpenJob,
    layout: Layout,
    model: CollectiveModel,
    config: MonteCarlo,
    *,
    executor: Executor | None = None,
) -> Draws:
    """Step times of one layout."""
    graph = build_layout(layout, job.pass_costs(layout))
    source = vary(graph, median_durations(graph, model), job.variation)
    fused = fuse(graph)
    if fused is not None:
        graph, source = fused.graph, fuse_distributions(fused, source, seed=config.seed)
    return draw_steps(graph, source, config, executor=executor)


def _candidate(job: OpenJob, tp: int, pp: int, name: str, memory_bytes: int) -> Candidate:
    chunks = INTERLEAVED_CHUNKS if name == "interleaved" else 1
    try:
        layout = job.layout(tp=tp, pp=pp, chunks=chunks, name=name)
        needed = job.peak_bytes(layout)
    except UsageError as error:
        return Candidate(name=f"TP{tp} PP{pp} {name}", layout=None, why_not=str(error))
    why = ""
    if needed is not None and needed > memory_bytes:
        why = f"needs {needed / 2**30:.1f} of {memory_bytes / 2**30:.1f} GiB"
    return Candidate(name=layout.name, layout=layout, peak_bytes=needed, why_not=why)
