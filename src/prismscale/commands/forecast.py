"""``prismscale forecast``, ``sensitivity``, ``place`` and ``explore``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from prismscale.analysis.accuracy_page import renew, section
from prismscale.analysis.rows import print_rows, write_rows
from prismscale.cluster import Cluster
from prismscale.commands.forecast_tables import (
    Promise,
    candidate_json,
    layout_row,
    placement_json,
    plain,
    pools_json,
    print_hot_nodes,
    print_notes,
    print_placement,
    print_promise,
    promise_json,
    save_section,
)
from prismscale.cost.collective import collective_model
from prismscale.errors import UsageError
from prismscale.files import write_json
from prismscale.forecast.executor import executor_named
from prismscale.forecast.explore import ExploreJob, candidates
from prismscale.forecast.explore import explore as explore_layouts
from prismscale.forecast.guarantees import (
    TrainingPlan,
    quantile_estimates,
    slowdown_probability,
    training_time,
)
from prismscale.forecast.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.nodes import read_nodes
from prismscale.forecast.placement import Evaluator, hot_node_study
from prismscale.forecast.placement import place as find_placement
from prismscale.forecast.recording import Model, load_recording, model_of, with_factors
from prismscale.forecast.samples import StepSamples, pipeline_places
from prismscale.forecast.sampling import LawDraws
from prismscale.forecast.scaling import tail_growth
from prismscale.forecast.sensitivity import ablate, factors_of, sobol_indices
from prismscale.forecast.validate import validate
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

REMARKS = (
    "MLPerf p99: runs have 150-600 steps, so p99 is decided by two to six of them. Random halves "
    "of one run differ by as much as the row below says, which is more than the bar allows.",
    "SE and ST distributions: figures are means over random splits, and two measured halves "
    "differ by what is called the floor. ST's p95 is decided by 2 of its 32 steps.",
    "Blocks of n^(1/3) neighbouring microbatches are the textbook length of a block bootstrap. "
    "Lengths 1, 2, 3, 4 and 8 were looked at: 1 misses SE's median, 8 misses SE's p95.",
    "Drift and jitter are told apart by a running median of 9 steps. 5, 17 and 33 steps give the "
    "same figures within 0.01 of KS.",
    "Placement: speeds of nodes are assumed, durations are the traces'. The miss on ST is with "
    "one node 14 % slower at worst; one node 30 % slower passes. Replicas keep their own "
    "recorded durations, so a search may end a little below the best of the placements that are "
    "equal in law.",
)


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
    recording = load_recording(run, cluster)
    model = model_of(recording, method=method, fused=fuse)
    config = _config(draws, seed, steps, memory)
    where = executor_named(executor, workers=workers, address=address)
    with TerminalReporter(console).stage("draw") as update:
        drawn = draw_steps(
            model.graph, model.source, config, executor=where, progress=update
        ).step_ns_D
    promise = _promise(drawn, plan, quantile, slower, seed)
    print_promise(console, promise)
    print_notes(console, model.notes)
    measured = recording.samples.observed_step_ns_T
    about = {
        "draws": draws,
        "seed": seed,
        "notes": list(model.notes),
        "measured_ns": [] if measured is None else measured.tolist(),
    }
    save_section(run, "forecast", {**about, **promise_json(promise), **pools_json(model)})


def sensitivity(
    run: Run,
    draws: Draws = 400,
    indices: Annotated[bool, typer.Option(help="Sobol indices too (method laws).")] = True,
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
    print_notes(console, model.notes)
    save_section(
        run,
        "sensitivity",
        {
            "base": {"p50_ns": found.base_p50_ns, "p95_ns": found.base_p95_ns},
            "ablations": [plain(a) for a in found.ablations],
            "sobol": [plain(i) for i in sobol],
            "notes": list(model.notes),
        },
    )


def place(
    run: Run,
    nodes: Annotated[Path, typer.Option(help="CSV with columns node and factor (or speed).")],
    ranks_per_node: Annotated[int, typer.Option(help="Ranks that one node hosts.")] = 1,
    rounds: Annotated[int, typer.Option(help="Placements that the search tries.")] = 400,
    hot: Annotated[
        str, typer.Option(help="One node slower at each stage, for example 1.1,1.5.")
    ] = "",
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
    print_placement(console, study, recording.samples, quantile)
    if hot:
        first = [s for s, replica in enumerate(replicas) if replica == replicas[0]]
        slow = hot_node_study(
            evaluate.with_factors, len(seats), _factors(hot, "--hot"), seats=first
        )
        print_hot_nodes(console, slow, [seats[s][0] for s in first], recording.samples)
    print_notes(console, model.notes)
    save_section(run, "placement", placement_json(study, recording.samples, quantile))


def explore(
    job: Annotated[Path, typer.Argument(help="What a layer costs, as TOML.")],
    tp: Annotated[str, typer.Option(help="Tensor-parallel degrees.")] = "1",
    pp: Annotated[str, typer.Option(help="Pipeline-parallel degrees.")] = "1",
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, interleaved, zero-bubble.")] = "1f1b",
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
        table.add_row(*layout_row(candidate))
    console.print(table)
    if out is not None:
        write_json(out, [candidate_json(c) for c in found])
        console.print(f"written: {out}")


validations = typer.Typer(no_args_is_help=True, help="Hold results against public measurements.")


@validations.callback()
def _group() -> None:
    """Keeps ``forecast`` a sub-command while it is the only one."""


@validations.command("forecast")
def validate_forecast(
    truth: Annotated[Path, typer.Option(help="Folder of public measurements.")],
    json: Annotated[Path | None, typer.Option(help="JSON file of the rows.")] = None,
    page: Annotated[Path | None, typer.Option(help="Accuracy page to renew.")] = Path(
        "docs/accuracy.md"
    ),
) -> None:
    """Hold forecasts against public measurements; misses are shown, and exit with 1."""
    rows = validate(truth)
    print_rows(rows, title="Forecasts against public measurements")
    if json is not None:
        write_rows(rows, json)
    if page is not None:
        command = "prismscale validate forecast"
        renew(page, "Forecast", section("Forecast", rows, command=command, remarks=REMARKS))
    if not all(row.ok for row in rows):
        raise typer.Exit(1)


def _model(run: Path, cluster: str | None, method: str, fuse: bool) -> Model:
    return model_of(load_recording(run, cluster), method=method, fused=fuse)


def _promise(
    step_ns_D: NDArray[np.int64], plan: TrainingPlan, quantile: float, slower: float, seed: int
) -> Promise:
    return Promise(
        step_ns_D=step_ns_D,
        plan=plan,
        quantile=quantile,
        slower=slower,
        quantiles=quantile_estimates(step_ns_D, sorted({*QUANTILES, quantile}), seed=seed),
        slow=slowdown_probability(step_ns_D, slower),
        whole=training_time(step_ns_D, plan, seed=seed),
        growth=tail_growth(step_ns_D, GROWTH),
    )


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


def _factors(text: str, option: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: give factors, for example 1.1,1.5") from error


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: give numbers, for example 4,8") from error
