"""``prismscale forecast``, ``sensitivity``, ``place`` and ``explore``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from prismscale.cluster import Cluster
from prismscale.cost.collective import collective_model
from prismscale.errors import UsageError
from prismscale.files import write_json
from prismscale.forecast.executor import executor_named
from prismscale.forecast.explore import Candidate, ExploreJob, candidates
from prismscale.forecast.explore import explore as explore_layouts
from prismscale.forecast.guarantees import (
    TrainingPlan,
    quantile_estimates,
    slowdown_probability,
    training_time,
    young_interval_s,
)
from prismscale.forecast.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.placement import Evaluator, PlacementStudy, read_nodes
from prismscale.forecast.placement import place as find_placement
from prismscale.forecast.recording import Model, load_recording, model_of, with_factors
from prismscale.forecast.samples import StepSamples, pipeline_places
from prismscale.forecast.sampling import LawDraws
from prismscale.forecast.scaling import tail_growth
from prismscale.forecast.sensitivity import ablate, factors_of, sobol_indices
from prismscale.progress import TerminalReporter

Run = Annotated[Path, typer.Argument(help="Run folder, captured or imported.")]
ClusterName = Annotated[
    str | None,
    typer.Option("--cluster", help="Whose model answers for communication not measured."),
]
Draws = Annotated[int, typer.Option("--draws", help="Monte Carlo draws.")]
Seed = Annotated[int, typer.Option("--seed", help="Of all random numbers.")]
Method = Annotated[
    str, typer.Option("--method", help="steps: recombine recorded steps; laws: fit pools; auto.")
]
Steps = Annotated[int, typer.Option("--steps", help="Simulated steps a draw; the last counts.")]
Memory = Annotated[float, typer.Option("--memory", help="GB for draws, in each worker.")]
ExecutorName = Annotated[str, typer.Option("--executor", help="local, serial or ray.")]
Workers = Annotated[int | None, typer.Option("--workers", help="Processes.", show_default="cores")]
Address = Annotated[str | None, typer.Option("--address", help="Of a Ray cluster, or auto.")]
Fuse = Annotated[bool, typer.Option("--fuse/--no-fuse", help="Draw lockstep ranks as one.")]

QUANTILES = (0.05, 0.5, 0.95, 0.99)
GROWTH = (1, 2, 4, 8)
LEADING = 4
"""Factors for which Sobol indices are estimated."""
FORECAST_FILE = "forecast.json"


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
    method: Method = "auto",
    steps: Steps = 1,
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
    at = sorted({*QUANTILES, quantile})
    model = _model(run, cluster, method, fuse)
    config = _config(draws, seed, steps, memory)
    where = executor_named(executor, workers=workers, address=address)
    with TerminalReporter(console).stage("draw") as update:
        drawn = draw_steps(
            model.graph, model.source, config, executor=where, progress=update
        ).step_ns_D
    found = quantile_estimates(drawn, at, seed=seed)
    slow = slowdown_probability(drawn, slower)
    whole = training_time(drawn, plan, seed=seed)
    table = Table("step time", "ms", "95 % interval")
    for q, estimate in found.items():
        interval = f"{estimate.low / 1e6:,.3f} … {estimate.high / 1e6:,.3f}"
        table.add_row(f"p{q * 100:g}", f"{estimate.value / 1e6:,.3f}", interval)
    console.print(table)
    console.print(
        f"P(step > {slower:g} × median) = {slow.value:.2%} ({slow.low:.2%} … {slow.high:.2%})"
    )
    promised = found[quantile].value * train_steps / 1e9 / 86_400
    console.print(
        f"{train_steps:,} steps: p50 {whole.days(0.5):,.2f}, p{quantile * 100:g} "
        f"{whole.days(quantile):,.2f} days; {promised:,.2f} if every step took its "
        f"p{quantile * 100:g}"
    )
    if mtbf_hours is not None:
        young = young_interval_s(checkpoint_s, plan.job_mtbf_s)
        console.print(
            f"{np.median(whole.failures_D):.0f} failures, a checkpoint every "
            f"{whole.interval_s:,.0f} s (Young: {young:,.0f} s)"
        )
    growth = tail_growth(drawn, GROWTH)
    _print_growth(console, growth)
    _print_notes(console, model.notes)
    _save(
        run,
        "forecast",
        {
            "draws": draws,
            "seed": seed,
            "quantiles_ns": {f"{q:g}": _plain(e) for q, e in found.items()},
            "slowdown": {"factor": slower, **_plain(slow)},
            "training_days": {f"{q:g}": whole.days(q) for q in at},
            "width": [_plain(g) for g in growth],
            "step_ns": drawn.tolist(),
            "pools": [
                {"name": f.pool.name, "law": f.fit.name, "ks": f.fit.ks, "n": f.fit.n,
                 "spatial_cv": f.pool.spatial_cv, "temporal_cv": f.pool.temporal_cv,
                 "note": f.fit.note}
                for f in model.fitted
            ],
            "notes": list(model.notes),
        },
    )


def sensitivity(
    run: Run,
    draws: Draws = 400,
    indices: Annotated[bool, typer.Option(help="Sobol indices of the leading few (method laws).")] = True,
    cluster: ClusterName = None,
    method: Method = "auto",
    steps: Steps = 1,
    seed: Seed = 0,
    memory: Memory = 1.0,
    executor: ExecutorName = "local",
    workers: Workers = None,
    address: Address = None,
    fuse: Fuse = True,
) -> None:
    """Which kernels and collectives to make steadier: the p95 without each one's variation."""
    console = Console(highlight=False)
    model = _model(run, cluster, method, fuse)
    config = _config(draws, seed, steps, memory)
    where = executor_named(executor, workers=workers, address=address)
    names, freeze = factors_of(model.source)
    reporter = TerminalReporter(console)
    with reporter.stage("freeze") as update:
        found = ablate(model.graph, names, freeze, config, executor=where, progress=update)
    # Recorded steps keep factors together: shares of the variance of each alone have no meaning.
    apart = indices and isinstance(model.source, LawDraws)
    leading = [a.name for a in found.ablations[:LEADING]] if apart else []
    sobol = sobol_indices(model.graph, leading, freeze, config, executor=where) if leading else []
    by_name = {i.name: i for i in sobol}
    table = Table("made steady", "p95, ms", "p95 falls by", "std falls by", "S1", "ST")
    for a in found.ablations:
        index = by_name.get(a.name)
        shown = (f"{index.first:.2f}", f"{index.total:.2f}") if index else ("", "")
        table.add_row(
            a.name, f"{a.p95_ns / 1e6:,.3f}", f"{a.p95_gain:.2%}", f"{a.std_gain:.1%}", *shown
        )
    console.print(table)
    console.print(
        f"as it is: p50 {found.base_p50_ns / 1e6:,.3f}, p95 {found.base_p95_ns / 1e6:,.3f} ms"
    )
    _print_notes(console, model.notes)
    _save(
        run,
        "sensitivity",
        {
            "base": {"p50_ns": found.base_p50_ns, "p95_ns": found.base_p95_ns},
            "ablations": [_plain(a) for a in found.ablations],
            "sobol": [_plain(i) for i in sobol],
            "notes": list(model.notes),
        },
    )


def place(
    run: Run,
    nodes: Annotated[Path, typer.Option(help="CSV with columns node and factor (or speed).")],
    ranks_per_node: Annotated[int, typer.Option(help="Ranks that one node hosts.")] = 1,
    rounds: Annotated[int, typer.Option(help="Placements that the search tries.")] = 400,
    quantile: Annotated[float, typer.Option(help="Of the step time, to be made small.")] = 0.95,
    draws: Draws = 64,
    cluster: ClusterName = None,
    method: Method = "auto",
    steps: Steps = 1,
    seed: Seed = 0,
) -> None:
    """Which node of unequal speed should host which stage and rank."""
    console = Console(highlight=False)
    recording = load_recording(run, cluster)
    model = model_of(recording, method=method, fused=False)
    seats, replicas = _seats(recording.samples, ranks_per_node)
    listed = read_nodes(nodes)
    evaluate = Evaluator(
        model.graph,
        lambda factor_R: with_factors(model.source, factor_R),
        seats,
        listed,
        draws=draws,
        seed=seed,
        quantile=quantile,
        steps=steps,
    )
    study = find_placement(evaluate, listed, replicas, seed=seed, rounds=rounds)
    _print_placement(console, study, recording.samples, quantile)
    _print_notes(console, model.notes)
    _save(
        run,
        "placement",
        {
            "quantile": quantile,
            "given_ns": study.given.step_ns,
            "best_ns": study.best.step_ns,
            "worst_ns": study.worst.step_ns,
            "tried": study.tried,
            "exhaustive": study.exhaustive,
            "seats": [
                {"ranks": list(seat), "node": study.nodes[n].name}
                for seat, n in zip(study.seats, study.best.node_S, strict=True)
            ],
        },
    )


def explore(
    job: Annotated[Path, typer.Argument(help="What a layer costs, as TOML.")],
    tp: Annotated[str, typer.Option(help="Tensor-parallel degrees.")] = "1",
    pp: Annotated[str, typer.Option(help="Pipeline-parallel degrees.")] = "1",
    schedule: Annotated[
        str, typer.Option(help="gpipe, 1f1b, interleaved, zero-bubble.")
    ] = "1f1b",
    cluster: Annotated[str, typer.Option(help="Target cluster.")] = "h100-sxm",
    draws: Draws = 200,
    seed: Seed = 0,
    steps: Steps = 1,
    memory: Memory = 1.0,
    executor: ExecutorName = "local",
    workers: Workers = None,
    address: Address = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """p50 and p95 of many layouts of one job, without running it."""
    console = Console(highlight=False)
    target = Cluster.load(cluster)
    spec = ExploreJob.load(job)
    listed = candidates(
        spec,
        tp=_numbers(tp, "--tp"),
        pp=_numbers(pp, "--pp"),
        schedules=[s.strip() for s in schedule.split(",")],
        memory_bytes=target.device.memory_bytes,
    )
    where = executor_named(executor, workers=workers, address=address)
    with TerminalReporter(console).stage("explore") as update:
        found = explore_layouts(
            spec,
            listed,
            collective_model(target),
            _config(draws, seed, steps, memory),
            executor=where,
            progress=update,
        )
    table = Table("layout", "p50, ms", "p95, ms", "peak, GiB", "")
    for candidate in found:
        table.add_row(*_layout_row(candidate))
    console.print(table)
    if out is not None:
        write_json(out, [_candidate_json(c) for c in found])
        console.print(f"written: {out}")


def _model(run: Path, cluster: str | None, method: str, fuse: bool) -> Model:
    return model_of(load_recording(run, cluster), method=method, fused=fuse)


def _config(draws: int, seed: int, steps: int, memory_gb: float) -> MonteCarlo:
    return MonteCarlo(draws=draws, seed=seed, steps=steps, memory_bytes=int(memory_gb * 1e9))


def _seats(samples: StepSamples, ranks_per_node: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Neighbouring ranks share a node; seats of a pipeline replica in the order of its stages."""
    world_size = samples.graph.world_size
    if ranks_per_node < 1 or world_size % ranks_per_node:
        raise UsageError(f"{world_size} ranks do not fill nodes of {ranks_per_node}")
    stage_R, replica_R = samples.stage_R, samples.replica_R
    if (stage_R < 0).any():
        stage_R, replica_R = pipeline_places(samples.graph)
    seats = [
        tuple(range(first, first + ranks_per_node))
        for first in range(0, world_size, ranks_per_node)
    ]
    # A node that holds several replicas is named after the first.
    seats.sort(key=lambda seat: (int(replica_R[seat[0]]), int(stage_R[seat[0]])))
    return seats, [int(replica_R[seat[0]]) for seat in seats]


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: give numbers, for example 4,8") from error


def _layout_row(candidate: Candidate) -> Sequence[str]:
    peak = f"{candidate.peak_bytes / 2**30:.1f}" if candidate.peak_bytes else ""
    if candidate.draws is None:
        return candidate.name, "", "", peak, f"[red]{candidate.why_not}[/]"
    p50, p95 = (candidate.draws.quantile_ns(q) / 1e6 for q in (0.5, 0.95))
    return candidate.name, f"{p50:,.2f}", f"{p95:,.2f}", peak, ""


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    drawn = candidate.draws
    return {
        "layout": candidate.name,
        "p50_ns": drawn.quantile_ns(0.5) if drawn else None,
        "p95_ns": drawn.quantile_ns(0.95) if drawn else None,
        "peak_bytes": candidate.peak_bytes,
        "why_not": candidate.why_not,
    }


def _print_growth(console: Console, growth: Sequence[Any]) -> None:
    table = Table("data-parallel width", "p50, ms", "p95, ms", "", title="upper bounds by width")
    for g in growth:
        note = "" if g.resolved else "too few draws"
        table.add_row(f"× {g.width:g}", f"{g.p50_ns / 1e6:,.3f}", f"{g.p95_ns / 1e6:,.3f}", note)
    console.print(table)


def _print_placement(
    console: Console, study: PlacementStudy, samples: StepSamples, quantile: float
) -> None:
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


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(f"  {note}", markup=False)


def _plain(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _save(run: Path, section: str, values: dict[str, Any]) -> None:
    """Put one section into the run's forecast file, and leave the others as they are."""
    path = run / FORECAST_FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError):
        known = {}
    write_json(path, {**known, "schema": "prismscale.forecast/1", section: values})
