"""What the forecast commands print and write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from prismscale.commands.forecast_page import write_forecast
from prismscale.files import write_json
from prismscale.forecast.explore import Candidate
from prismscale.forecast.guarantees import (
    DAY_S,
    Estimate,
    TrainingPlan,
    TrainingTime,
    young_interval_s,
)
from prismscale.forecast.placement import HotNode, PlacementStudy
from prismscale.forecast.recording import Model
from prismscale.forecast.samples import StepSamples
from prismscale.forecast.scaling import TailAtWidth

FORECAST_FILE = "forecast.json"


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a forecast says."""

    step_ns_D: NDArray[np.int64]
    plan: TrainingPlan
    quantile: float
    slower: float
    quantiles: Mapping[float, Estimate]
    slow: Estimate
    whole: TrainingTime
    growth: Sequence[TailAtWidth]


def print_promise(console: Console, promise: Promise) -> None:
    """Quantiles, slow steps, days of training, wider jobs."""
    table = Table("step time", "ms", "95 % interval")
    for q, estimate in promise.quantiles.items():
        interval = f"{estimate.low / 1e6:,.3f} … {estimate.high / 1e6:,.3f}"
        table.add_row(f"p{q * 100:g}", f"{estimate.value / 1e6:,.3f}", interval)
    console.print(table)
    slow, plan, whole = promise.slow, promise.plan, promise.whole
    console.print(
        f"P(step > {promise.slower:g} × median) = {slow.value:.2%} "
        f"({slow.low:.2%} … {slow.high:.2%})"
    )
    name = f"p{promise.quantile * 100:g}"
    every = promise.quantiles[promise.quantile].value * plan.steps / 1e9 / DAY_S
    console.print(
        f"{plan.steps:,} steps: p50 {whole.days(0.5):,.2f}, {name} "
        f"{whole.days(promise.quantile):,.2f} days; {every:,.2f} if every step took its {name}"
    )
    if plan.mtbf_hours is not None:
        young = young_interval_s(plan.checkpoint_s, plan.job_mtbf_s)
        console.print(
            f"{np.median(whole.failures_D):.0f} failures, a checkpoint every "
            f"{whole.interval_s:,.0f} s (Young: {young:,.0f} s)"
        )
    _print_growth(console, promise.growth)


def promise_json(promise: Promise) -> dict[str, Any]:
    """The same for machines."""
    return {
        "quantiles_ns": {f"{q:g}": plain(e) for q, e in promise.quantiles.items()},
        "slowdown": {"factor": promise.slower, **plain(promise.slow)},
        "training_days": {f"{q:g}": promise.whole.days(q) for q in promise.quantiles},
        "width": [plain(g) for g in promise.growth],
        "step_ns": promise.step_ns_D.tolist(),
    }


def pools_json(model: Model) -> dict[str, Any]:
    """Pools and their fits."""
    return {
        "pools": [
            {
                "name": f.pool.name,
                "law": f.fit.name,
                "ks": f.fit.ks,
                "n": f.fit.n,
                "spatial_cv": f.pool.spatial_cv,
                "temporal_cv": f.pool.temporal_cv,
                "note": f.fit.note,
            }
            for f in model.fitted
        ]
    }


def _print_growth(console: Console, growth: Sequence[TailAtWidth]) -> None:
    table = Table("data-parallel width", "p50, ms", "p95, ms", "", title="upper bounds by width")
    for g in growth:
        note = "" if g.resolved else "too few draws"
        table.add_row(f"× {g.width:g}", f"{g.p50_ns / 1e6:,.3f}", f"{g.p95_ns / 1e6:,.3f}", note)
    console.print(table)


def layout_row(candidate: Candidate) -> Sequence[str]:
    """A row of the table of layouts."""
    peak = f"{candidate.peak_bytes / 2**30:.1f}" if candidate.peak_bytes else ""
    if candidate.draws is None:
        return candidate.name, "", "", peak, f"[red]{candidate.why_not}[/]"
    p50, p95 = (candidate.draws.quantile_ns(q) / 1e6 for q in (0.5, 0.95))
    return candidate.name, f"{p50:,.2f}", f"{p95:,.2f}", peak, ""


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """A layout for machines."""
    drawn = candidate.draws
    return {
        "layout": candidate.name,
        "p50_ns": drawn.quantile_ns(0.5) if drawn else None,
        "p95_ns": drawn.quantile_ns(0.95) if drawn else None,
        "peak_bytes": candidate.peak_bytes,
        "why_not": candidate.why_not,
    }


def print_placement(
    console: Console, study: PlacementStudy, samples: StepSamples, quantile: float
) -> None:
    """The best placement, seat by seat, and what it gains."""
    table = Table("stage", "replica", "ranks", "node", "factor")
    for seat, n in zip(study.seats, study.best.node_S, strict=True):
        node = study.nodes[n]
        ranks = str(seat[0]) if len(seat) == 1 else f"{seat[0]}-{seat[-1]}"
        stage, replica = samples.stage_R[seat[0]], samples.replica_R[seat[0]]
        table.add_row(str(stage), str(replica), ranks, node.name, f"{node.factor:.3f}")
    console.print(table)
    how = "all different ones" if study.exhaustive else "search"
    console.print(
        f"p{quantile * 100:g}: given order {study.given.step_ns / 1e6:,.3f} ms, best "
        f"{study.best.step_ns / 1e6:,.3f} ms ({study.gain:.3f}× faster), worst seen "
        f"{study.worst.step_ns / 1e6:,.3f} ms; {study.tried} placements tried ({how})"
    )


def placement_json(study: PlacementStudy, samples: StepSamples, quantile: float) -> dict[str, Any]:
    """The same for machines."""
    return {
        "quantile": quantile,
        "given_ns": study.given.step_ns,
        "best_ns": study.best.step_ns,
        "worst_ns": study.worst.step_ns,
        "tried": study.tried,
        "exhaustive": study.exhaustive,
        "seats": [
            {
                "ranks": list(seat),
                "stage": int(samples.stage_R[seat[0]]),
                "replica": int(samples.replica_R[seat[0]]),
                "node": study.nodes[n].name,
                "factor": study.nodes[n].factor,
            }
            for seat, n in zip(study.seats, study.best.node_S, strict=True)
        ],
    }


def print_hot_nodes(
    console: Console, found: Sequence[HotNode], ranks: Sequence[int], samples: StepSamples
) -> None:
    """What one slow node costs, by the stage that it hosts."""
    factors = sorted({h.factor for h in found})
    table = Table("one slow node at", *(f"× {f:g}" for f in factors))
    seats = list(dict.fromkeys(h.seat for h in found))
    for seat, rank in zip(seats, ranks, strict=True):
        costs = {h.factor: h.slowdown for h in found if h.seat == seat}
        table.add_row(f"stage {samples.stage_R[rank]}", *(f"+{costs[f]:.1%}" for f in factors))
    console.print(table)


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """What to know about the figures."""
    for note in notes:
        console.print(f"  {note}", markup=False)


def plain(value: Any) -> dict[str, Any]:
    """Fields of a dataclass."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def save_section(run: Path, section: str, values: dict[str, Any]) -> None:
    """Put one section into the run's forecast file and report, and leave the others as they are.

    Raises:
        StorageError: a file cannot be written.
    """
    path = run / FORECAST_FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError):
        # What cannot be read cannot be kept, and every command can make its section again.
        known = {}
    found = {**known, "schema": "prismscale.forecast/1", section: values}
    write_json(path, found)
    write_forecast(run, found)
