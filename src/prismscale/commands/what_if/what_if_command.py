"""``prismscale what-if``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from prismscale.commands.forecast_options import (
    Address,
    ClusterName,
    CommunicationCv,
    ComputeScale,
    Draws,
    ExecutorName,
    Kernels,
    Memory,
    Method,
    Run,
    Seed,
    Slow,
    Stalls,
    Steps,
    Variability,
    Workers,
    changes,
    draws_config,
    recording,
)
from prismscale.commands.forecast_results import plain, save_section
from prismscale.commands.forecast_tables import print_notes
from prismscale.commands.what_if.what_if_table import print_hoped
from prismscale.forecast.draws.executor import executor_named
from prismscale.forecast.draws.montecarlo import MonteCarlo
from prismscale.forecast.hoped_run import HopedRun, HopedRuns, Side
from prismscale.progress import TerminalReporter, terminal


def what_if(
    run: Run,
    what_ifs: Annotated[
        list[str],
        typer.Argument(
            metavar="WHAT-IF…",
            help="kernel=REGEX xF, host=xF, overlap=GROUP off, link=nvlink|network xF, "
            "group=GROUP on network|nvlink, links=shared, compute=shared, recompute=off, "
            "dtype=fp8|bf16|fp16|fp32. Several hold together.",
        ),
    ],
    draws: Draws = 400,
    cluster: ClusterName = None,
    compute_scale: ComputeScale = None,
    slow: Slow = None,
    kernels: Kernels = None,
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
) -> None:
    """What a run would take if something were otherwise, without capturing again."""
    console = terminal()
    config = draws_config(draws, seed, steps, memory)
    runs = HopedRuns(
        load=lambda asked: recording(run, asked, communication_cv, stalls),
        changes=changes(cluster, compute_scale, slow, kernels, variability),
        config=config,
        method=method,
        executor=executor_named(executor, workers=workers, address=address),
    )
    with TerminalReporter(console).stage("draw") as update:
        found = runs.compare(what_ifs, update)
    print_hoped(console, found)
    # Those of the what-ifs themselves are in the table.
    notes = found.before.notes
    print_notes(console, notes)
    save_section(run, "what_if", hoped_json(found, config, notes))


def hoped_json(found: HopedRun, config: MonteCarlo, notes: tuple[str, ...]) -> dict[str, Any]:
    """What the command says."""
    return {
        "draws": config.draws,
        "seed": config.seed,
        "what_ifs": [
            {**plain(effect), "alone_step_ns": alone_ns}
            for effect, alone_ns in zip(found.effects, found.alone_ns, strict=True)
        ],
        "before": _side_json(found.before),
        "after": _side_json(found.after),
        "notes": list(notes),
    }


def _side_json(side: Side) -> dict[str, Any]:
    return {
        "step_ns": side.step_ns,
        "exposed_ns": side.exposed_ns,
        "quantiles_ns": {f"{q:g}": ns for q, ns in side.quantile_ns.items()},
        "stages": [
            {"name": s.name, "ranks": s.ranks, "breakdown": plain(s.breakdown)} for s in side.stages
        ],
    }
