"""``prismscale forecast`` and ``sensitivity``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from prismscale.commands.forecast_options import (
    DEFAULT_CV,
    Address,
    ClusterName,
    CommunicationCv,
    ComputeScale,
    Draws,
    ExecutorName,
    Fuse,
    Kernels,
    Memory,
    Method,
    Run,
    Seed,
    Slow,
    Stalls,
    Steps,
    Variability,
    WhatIf,
    Workers,
    assumed,
    changes,
    draws_config,
)
from prismscale.commands.forecast_results import measured_ns, plain, promise_json, save_section
from prismscale.commands.forecast_tables import (
    Guarantee,
    event_notes,
    print_base,
    print_notes,
    print_promise,
    print_sensitivity,
)
from prismscale.errors import UsageError
from prismscale.forecast.distributions.scaling import tail_growth
from prismscale.forecast.draws.executor import Executor, executor_named
from prismscale.forecast.draws.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.draws.sampling import DistributionDraws
from prismscale.forecast.guarantees import (
    TrainingPlan,
    quantile_estimates,
    slowdown_probability,
    training_time,
)
from prismscale.forecast.model import RECORDED, Model, model_of
from prismscale.forecast.recording import load_recording
from prismscale.forecast.sensitivity import Sensitivity, ablate, factors_of
from prismscale.forecast.sobol import ESTIMATORS, SobolIndex, sobol_indices
from prismscale.progress import TerminalReporter

QUANTILES = (0.05, 0.5, 0.95, 0.99)
GROWTH = (1, 2, 4, 8)
LEADING = 4
"""Factors for which Sobol indices are estimated."""


def forecast(
    run: Run,
    draws: Draws = 1000,
    quantile: Annotated[float, typer.Option(help="That is promised.")] = 0.95,
    slower: Annotated[float, typer.Option(help="P(step > this × median).")] = 1.1,
    train_steps: Annotated[int, typer.Option(help="Steps of the whole training.")] = 100_000,
    nodes: Annotated[int, typer.Option(help="Machines that can fail.")] = 1,
    mtbf_hours: Annotated[
        float | None, typer.Option(help="Between failures of one node.", show_default="never")
    ] = None,
    checkpoint_s: Annotated[float, typer.Option(help="To write a checkpoint.")] = 60.0,
    restart_s: Annotated[float, typer.Option(help="From a failure to the first step.")] = 600.0,
    interval_s: Annotated[
        float | None, typer.Option(help="Between checkpoints.", show_default="Daly's optimum")
    ] = None,
    cluster: ClusterName = None,
    compute_scale: ComputeScale = None,
    slow: Slow = None,
    kernels: Kernels = None,
    what_if: WhatIf = None,
    variability: Variability = RECORDED,
    communication_cv: CommunicationCv = DEFAULT_CV,
    stalls: Stalls = 0.0,
    method: Method = "auto",
    steps: Steps = None,
    seed: Seed = 0,
    memory: Memory = 1.0,
    executor: ExecutorName = "local",
    workers: Workers = None,
    address: Address = None,
    fuse: Fuse = True,
) -> None:
    """The step time as a distribution: quantiles, the chance of slow steps, days of training."""
    console = Console(highlight=False)
    plan = TrainingPlan(
        steps=train_steps,
        nodes=nodes,
        mtbf_hours=mtbf_hours,
        checkpoint_s=checkpoint_s,
        restart_s=restart_s,
        interval_s=interval_s,
    )
    config = draws_config(draws, seed, steps, memory)
    where = executor_named(executor, workers=workers, address=address)
    recording = load_recording(
        run,
        changes=changes(cluster, compute_scale, slow, kernels, what_if),
        variation=assumed(communication_cv, stalls),
    )
    model = model_of(recording, method=method, fused=fuse, variability=variability)
    config = replace(config, steps=steps or model.steps)
    with TerminalReporter(console).stage("draw") as update:
        drawn = draw_steps(
            model.graph, model.source, config, base=model.base, executor=where, progress=update
        ).step_ns_D
    plan = replace(plan, extra_ns=sum(event.per_step_ns for event in recording.events))
    promise = _promise(drawn, plan, quantile, slower, seed)
    measured = measured_ns(run, recording.samples)
    print_base(console, model.step_ns)
    print_promise(console, promise)
    notes = [*event_notes(recording.events), *model.notes, *measured.notes]
    print_notes(console, notes)
    save_section(run, "step", promise_json(promise, model, config, measured))


def sensitivity(
    run: Run,
    draws: Draws = 400,
    indices: Annotated[bool, typer.Option(help="Sobol indices too (method fitted).")] = True,
    estimator: Annotated[
        str, typer.Option(help="Of Sobol indices: own, or salib (prismscale\\[sensitivity]).")
    ] = "own",
    cluster: ClusterName = None,
    compute_scale: ComputeScale = None,
    slow: Slow = None,
    kernels: Kernels = None,
    what_if: WhatIf = None,
    variability: Variability = RECORDED,
    communication_cv: CommunicationCv = DEFAULT_CV,
    stalls: Stalls = 0.0,
    method: Method = "auto",
    steps: Steps = None,
    seed: Seed = 0,
    memory: Memory = 1.0,
    executor: ExecutorName = "local",
    workers: Workers = None,
    address: Address = None,
    fuse: Fuse = True,
) -> None:
    """Which kernels and collectives to make steadier: the p95 without each one's variation."""
    if estimator not in ESTIMATORS:
        raise UsageError(f"--estimator {estimator}: allowed are {', '.join(ESTIMATORS)}")
    console = Console(highlight=False)
    config = draws_config(draws, seed, steps, memory)
    where = executor_named(executor, workers=workers, address=address)
    recording = load_recording(
        run,
        changes=changes(cluster, compute_scale, slow, kernels, what_if),
        variation=assumed(communication_cv, stalls),
    )
    model = model_of(recording, method=method, fused=fuse, variability=variability)
    config = replace(config, steps=steps or model.steps)
    names, freeze = factors_of(model.whole or model.source, model.fused)
    reporter = TerminalReporter(console)
    with reporter.stage("freeze") as update:
        found = ablate(
            model.graph, names, freeze, config, base=model.base, executor=where, progress=update
        )
    sobol = _indices(model, found, config, where, estimator) if indices else []
    print_base(console, model.step_ns)
    print_sensitivity(console, found, sobol)
    notes = [*model.notes]
    if indices and not sobol:
        notes.append(
            "no Sobol indices: recorded steps keep factors together; --method fitted draws them "
            "apart"
        )
    print_notes(console, notes)
    values: dict[str, Any] = {
        "draws": draws,
        "seed": seed,
        "step_without_variation_ns": model.step_ns,
        "p50_ns": found.base_p50_ns,
        "p95_ns": found.base_p95_ns,
        "ablations": [plain(a) for a in found.ablations],
        "sobol": [plain(i) for i in sobol],
        "estimator": estimator,
        "notes": notes,
    }
    save_section(run, "sensitivity", values)


def _indices(
    model: Model, found: Sensitivity, config: MonteCarlo, where: Executor, estimator: str
) -> list[SobolIndex]:
    """Of the leading factors; none where they are not drawn independently."""
    source = model.whole or model.source
    if not isinstance(source, DistributionDraws):
        return []
    leading = [a.name for a in found.ablations[:LEADING]]
    return sobol_indices(source, leading, config, executor=where, estimator=estimator)


def _promise(
    step_ns_D: NDArray[np.int64], plan: TrainingPlan, quantile: float, slower: float, seed: int
) -> Guarantee:
    return Guarantee(
        step_ns_D=step_ns_D,
        plan=plan,
        quantile=quantile,
        slower=slower,
        quantiles=quantile_estimates(step_ns_D, sorted({*QUANTILES, quantile}), seed=seed),
        slow=slowdown_probability(step_ns_D, slower),
        whole=training_time(step_ns_D, plan, seed=seed),
        growth=tail_growth(step_ns_D, GROWTH),
    )
