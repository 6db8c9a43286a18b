"""``prismscale forecast`` and ``sensitivity``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any

import typer

from prismscale.commands.forecast_options import (
    Address,
    CheckpointS,
    ClusterName,
    CommunicationCv,
    ComputeScale,
    Draws,
    ExecutorName,
    Failures,
    Fuse,
    IntervalS,
    Kernels,
    Memory,
    Method,
    MtbfHours,
    Nodes,
    RepairHours,
    ReplaceS,
    RestartS,
    Run,
    Seed,
    Slow,
    Spares,
    Stalls,
    Steps,
    TrainSteps,
    Variability,
    WhatIf,
    Workers,
    changes,
    draws_config,
    recording,
)
from prismscale.commands.forecast_results import measured_ns, plain, promise_json, save_section
from prismscale.commands.forecast_tables import (
    Guarantee,
    event_notes,
    print_base,
    print_notes,
    print_promise,
    print_sensitivity,
    print_spread,
)
from prismscale.errors import UsageError
from prismscale.forecast.distributions.scaling import tail_growth
from prismscale.forecast.draws.executor import Executor, executor_named
from prismscale.forecast.draws.montecarlo import Draws as DrawnSteps
from prismscale.forecast.draws.montecarlo import MonteCarlo, draw_each, draw_steps
from prismscale.forecast.draws.sampling import DistributionDraws
from prismscale.forecast.guarantees import quantile_estimates, slowdown_probability
from prismscale.forecast.model import Model, model_of
from prismscale.forecast.modelled.profile_draws import SOURCES, ProfileDraws
from prismscale.forecast.run_spread import (
    LOG_STEPS,
    RunSpread,
    VariationShare,
    variation_shares,
)
from prismscale.forecast.sensitivity import Sensitivity, ablate, factors_of
from prismscale.forecast.sobol import ESTIMATORS, SobolIndex, sobol_indices
from prismscale.forecast.training import TrainingPlan, best_interval_s, training_time
from prismscale.forecast.training_plan import Machines, PlannedTraining, training_plan
from prismscale.progress import TerminalReporter, terminal

QUANTILES = (0.05, 0.5, 0.95, 0.99)
GROWTH = (1, 2, 4, 8)
FEWER, FEWEST_DRAWS = 4, 256
"""How many times fewer draws tell what sources do, and how many at least."""
LEADING = 4
"""Factors for which Sobol indices are estimated."""


def forecast(
    run: Run,
    draws: Draws = 1000,
    quantile: Annotated[float, typer.Option(help="That is promised.")] = 0.95,
    slower: Annotated[float, typer.Option(help="P(step > this × median).")] = 1.1,
    train_steps: TrainSteps = 100_000,
    nodes: Nodes = None,
    failures: Failures = None,
    mtbf_hours: MtbfHours = None,
    checkpoint_s: CheckpointS = None,
    restart_s: RestartS = 600.0,
    replace_s: ReplaceS = 0.0,
    spares: Spares = None,
    repair_hours: RepairHours = 24.0,
    interval_s: IntervalS = None,
    shares: Annotated[
        bool,
        typer.Option(
            "--shares/--no-shares", help="What each source of a profile does to p95 - p50."
        ),
    ] = True,
    log_steps: Annotated[
        int, typer.Option("--log-steps", min=2, max=10_000, help="Of the log whose spread is told.")
    ] = LOG_STEPS,
    cluster: ClusterName = None,
    compute_scale: ComputeScale = None,
    slow: Slow = None,
    kernels: Kernels = None,
    what_if: WhatIf = None,
    variability: Variability = None,
    communication_cv: CommunicationCv = None,
    stalls: Stalls = None,
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
    if not 0 < quantile < 1:
        raise UsageError(f"--quantile {quantile}: it lies between 0 and 1")
    if not 0 < slower < math.inf:
        raise UsageError(f"--slower {slower}: give a finite factor above 0, for example 1.1")
    console = terminal()
    machines = Machines(
        nodes=nodes,
        failures=failures,
        mtbf_hours=mtbf_hours,
        checkpoint_s=checkpoint_s,
        restart_s=restart_s,
        replace_s=replace_s,
        spares=spares,
        repair_hours=repair_hours,
        interval_s=interval_s,
    )
    config = draws_config(draws, seed, steps, memory)
    where = executor_named(executor, workers=workers, address=address)
    asked = changes(cluster, compute_scale, slow, kernels, variability, what_if)
    found = recording(run, asked, communication_cv, stalls)
    planned = training_plan(found, machines, train_steps)
    model = model_of(found, method=method, fused=fuse)
    config = model.drawn(config)
    reporter = TerminalReporter(console)
    with reporter.stage("draw") as update:
        drawn = draw_steps(
            model.graph, model.source, config, base=model.base, executor=where, progress=update
        )
    promise = _promise(drawn, planned, model.step_ns, quantile, slower, log_steps)
    sources = _sources(model, config, where, reporter) if shares else ()
    measured = measured_ns(run, found.samples)
    print_base(console, model.step_ns)
    print_promise(console, promise)
    if promise.spread is not None:
        print_spread(console, promise.spread, sources)
    notes = [*event_notes(found.events), *model.notes, *measured.notes, *planned.notes]
    print_notes(console, notes)
    save_section(run, "step", promise_json(promise, model, config, measured, sources, notes))


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
    variability: Variability = None,
    communication_cv: CommunicationCv = None,
    stalls: Stalls = None,
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
    console = terminal()
    config = draws_config(draws, seed, steps, memory)
    where = executor_named(executor, workers=workers, address=address)
    asked = changes(cluster, compute_scale, slow, kernels, variability, what_if)
    model = model_of(recording(run, asked, communication_cv, stalls), method=method, fused=fuse)
    config = model.drawn(config)
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
    drawn: DrawnSteps,
    planned: PlannedTraining,
    base_ns: int,
    quantile: float,
    slower: float,
    log_steps: int,
) -> Guarantee:
    steps_AT, plan, seed = drawn.by_run_AT, planned.plan, drawn.config.seed
    has_runs = steps_AT.shape[1] > 1 and len(steps_AT) > 1
    together = steps_AT if has_runs else drawn.step_ns_D
    return Guarantee(
        step_ns_D=drawn.step_ns_D,
        base_ns=base_ns,
        plan=plan,
        gpus=planned.gpus,
        quantile=quantile,
        slower=slower,
        quantiles=quantile_estimates(together, sorted({*QUANTILES, quantile}), seed=seed),
        slow=slowdown_probability(together, slower),
        whole=training_time(together, plan, seed=seed),
        best_interval_s=_best_interval(drawn, plan, seed),
        spread=RunSpread.of(steps_AT, log_steps) if has_runs else None,
        growth=tail_growth(drawn.step_ns_D, GROWTH),
    )


def _best_interval(drawn: DrawnSteps, plan: TrainingPlan, seed: int) -> float | None:
    if plan.fleet is None:
        return None
    work_s = (float(drawn.step_ns_D.mean()) + plan.extra_ns) * plan.steps / 1e9
    return best_interval_s(work_s, plan, seed=seed)


def _sources(
    model: Model, config: MonteCarlo, where: Executor, reporter: TerminalReporter
) -> tuple[VariationShare, ...]:
    """Each source of a profile, switched off in turn; nothing where there is no profile."""
    source = model.source
    if not isinstance(source, ProfileDraws):
        return ()
    # Many runs of few steps: most of what differs, differs between runs.
    draws = max(config.draws // FEWER, min(config.draws, FEWEST_DRAWS))
    fewer = replace(config, draws=draws, steps=None, counted=2)
    variants: dict[str | None, ProfileDraws] = {None: source}
    variants |= {name: source.without(name) for name in SOURCES}
    with reporter.stage("sources") as update:
        drawn = draw_each(
            model.graph,
            [(own, model.base) for own in variants.values()],
            fewer,
            executor=where,
            progress=update,
        )
    return variation_shares(dict(zip(variants, drawn, strict=True)).__getitem__, SOURCES)
