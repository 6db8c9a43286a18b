"""What the forecast commands leave in a run folder: the ``forecast`` member of ``results.json``.

The member has one part for each command; a command renews its own and leaves the others, and the
run's own figures, as they are. The schema is in ``docs/results.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismscale.analysis.result import SCHEMA
from prismscale.commands.forecast_page import write_forecast
from prismscale.commands.forecast_tables import Guarantee, placed_by
from prismscale.durations.samples import StepSamples
from prismscale.errors import FormatError
from prismscale.files import write_json
from prismscale.forecast.draws.montecarlo import MonteCarlo
from prismscale.forecast.model import Model
from prismscale.forecast.placement.node_placement import HotNode, PlacedTail, PlacementStudy
from prismscale.forecast.run_spread import RunSpread, VariationShare
from prismscale.runfolder import RunFolder
from prismscale.typed_files import read_json

MEMBER = "forecast"
MOST_KEPT = 2_000
"""Draws in ``results.json``; of more, as many evenly spaced ones in order of size."""


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """Step times that a forecast can be held against."""

    step_ns: tuple[int, ...]
    notes: tuple[str, ...] = ()


def measured_ns(run: Path, samples: StepSamples) -> MeasuredSteps:
    """Recorded steps of all ranks; without them, what the run's live ranks observed."""
    recorded_T = samples.observed_step_ns_T
    if recorded_T is not None:
        return MeasuredSteps(step_ns=tuple(recorded_T.tolist()))
    live = _read(RunFolder(root=run).results).get("live", [])
    found = tuple(ns for rank in live for ns in rank["step_ns"])
    if not found:
        return MeasuredSteps(step_ns=())
    median = float(np.median(found)) / 1e6
    note = f"live ranks observed {len(found)} steps, median {median:,.3f} ms"
    return MeasuredSteps(step_ns=found, notes=(note,))


def save_section(run: Path, section: str, values: dict[str, Any]) -> None:
    """Put one part into the run's results and report, and leave the others as they are.

    Raises:
        StorageError: a file cannot be written.
        FormatError: ``results.json`` is damaged, or of another version.
    """
    path = RunFolder(root=run).results
    known = _read(path) or {"schema": SCHEMA}
    if known.get("schema") != SCHEMA:
        raise FormatError(f"{path}: schema is {known.get('schema')!r}; this version reads {SCHEMA}")
    found = {**known, MEMBER: {**known.get(MEMBER, {}), section: values}}
    write_json(path, found)
    write_forecast(run, found[MEMBER])


def promise_json(
    promise: Guarantee,
    model: Model,
    config: MonteCarlo,
    measured: MeasuredSteps,
    sources: Sequence[VariationShare],
    notes: Sequence[str],
) -> dict[str, Any]:
    """What ``prismscale forecast`` says."""
    whole, spread = promise.whole, promise.spread
    return {
        "draws": len(promise.step_ns_D),
        "seed": config.seed,
        "step_without_variation_ns": model.step_ns,
        "quantile": promise.quantile,
        "quantiles_ns": {f"{q:g}": plain(e) for q, e in promise.quantiles.items()},
        "slowdown": {"factor": promise.slower, **plain(promise.slow)},
        "variation_cost": promise.variation,
        "spread": spread_json(spread),
        "sources": [plain(source) for source in sources],
        "training": {
            "steps": promise.plan.steps,
            "days": {f"{q:g}": whole.days(q) for q in promise.quantiles},
            "failures": float(np.median(whole.failures_D)),
            "checkpoint_interval_s": whole.interval_s if np.isfinite(whole.interval_s) else None,
            "best_interval_s": promise.best_interval_s,
            "parts_days": promise.parts_days,
            "gpu_hours": float(whole.days_D.mean()) * 24 * promise.gpus,
        },
        "width": [plain(g) for g in promise.growth],
        "step_ns": _thinned(promise.step_ns_D),
        "measured_ns": list(measured.step_ns),
        "pools": [_pool_json(model, i) for i in range(len(model.fitted))],
        "notes": list(notes),
    }


def placement_json(
    study: PlacementStudy,
    samples: StepSamples,
    quantile: float | None,
    hot: Sequence[HotNode],
    stage_S: Sequence[int],
    notes: Sequence[str],
    tails: Sequence[PlacedTail] = (),
) -> dict[str, Any]:
    """The best placement, node slot by node slot, and what one slow node costs.

    ``quantile`` is that of the step by which placements were compared; None: they were compared by
    the step without other variation.
    """
    return {
        "compared": placed_by(quantile),
        "given_ns": study.given.step_ns,
        "best_ns": study.best.step_ns,
        "worst_ns": study.worst.step_ns,
        "tried": study.tried,
        "exhaustive": study.exhaustive,
        "tails": [plain(tail) for tail in tails],
        "node_slots": [
            {
                "ranks": list(node_slot),
                "stage": int(samples.stage_R[node_slot[0]]),
                "replica": int(samples.replica_R[node_slot[0]]),
                "node": study.nodes[n].name,
                "factor": study.nodes[n].factor,
            }
            for node_slot, n in zip(study.node_slots, study.best.node_S, strict=True)
        ],
        "hot": [{"stage": stage_S[h.node_slot], **plain(h)} for h in hot],
        "notes": list(notes),
    }


def spread_json(spread: RunSpread | None) -> dict[str, Any] | None:
    """What differs between runs, between steps, and in a log."""
    return None if spread is None else {**plain(spread), "log": plain(spread.log)}


def plain(value: Any) -> dict[str, Any]:
    """Fields of a dataclass."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _pool_json(model: Model, index: int) -> dict[str, Any]:
    fitted = model.fitted[index]
    return {
        "name": fitted.pool.name,
        "distribution": fitted.fit.name,
        "ks": fitted.fit.ks,
        "n": fitted.fit.n,
        "spatial_cv": fitted.pool.spatial_cv,
        "temporal_cv": fitted.pool.temporal_cv,
        "note": fitted.fit.note,
    }


def _thinned(step_ns_D: NDArray[np.int64]) -> list[int]:
    if len(step_ns_D) <= MOST_KEPT:
        return [int(ns) for ns in step_ns_D]
    at = (np.arange(MOST_KEPT) + 0.5) / MOST_KEPT
    return [int(ns) for ns in np.quantile(step_ns_D, at)]


def _read(path: Path) -> dict[str, Any]:
    found = read_json(path) if path.exists() else {}
    if not isinstance(found, dict):
        raise FormatError(f"{path}: not an object; run the command again that wrote it")
    return found
