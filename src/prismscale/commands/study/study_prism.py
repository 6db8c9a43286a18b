"""``prismscale study prism``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from prismscale.commands.forecast_options import (
    Address,
    ClusterName,
    ComputeScale,
    Draws,
    ExecutorName,
    Kernels,
    Memory,
    Seed,
    Slow,
    Steps,
    Variability,
    WhatIf,
    Workers,
    changes,
    draws_config,
    factors,
    recording,
)
from prismscale.commands.forecast_results import plain, save_section, spread_json
from prismscale.commands.forecast_tables import print_notes
from prismscale.commands.study.study_table import print_studies
from prismscale.errors import UsageError
from prismscale.forecast.draws.executor import Executor, executor_named
from prismscale.forecast.draws.montecarlo import MonteCarlo
from prismscale.forecast.placement.placed_job import Search
from prismscale.forecast.prism_study import Experiments, PrismStudy, prism_study
from prismscale.forecast.recording import Recording
from prismscale.progress import StageUpdate, TerminalReporter, terminal

studies = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Published experiments, on runs of your own.",
)


@studies.callback()
def _group() -> None:
    """Keeps the name of a single study on the command line."""


@studies.command("prism")
def study_prism(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="Run folders of one job, at one size or several."),
    ],
    draws: Draws = 1000,
    slower: Annotated[str, typer.Option(help="P(step > each × median).")] = "1.01,1.02,1.05,1.1",
    hot: Annotated[
        str, typer.Option(help="One node slower by each, at each stage.")
    ] = "1.1,1.2,1.3,1.4,1.5",
    rounds: Annotated[int, typer.Option(help="Placements that the search tries.")] = 400,
    cluster: ClusterName = None,
    compute_scale: ComputeScale = None,
    slow: Slow = None,
    kernels: Kernels = None,
    what_if: WhatIf = None,
    variability: Variability = None,
    steps: Steps = None,
    seed: Seed = 0,
    memory: Memory = 1.0,
    executor: ExecutorName = "local",
    workers: Workers = None,
    address: Address = None,
) -> None:
    """PRISM's experiments on null runs: tails by scale, chance of slow steps, what to make steady,
    a hot node at each stage, unequal nodes placed.

    Each experiment is what prismscale forecast, sensitivity and place do with the same options.
    """
    asked = Experiments(
        config=draws_config(draws, seed, steps, memory),
        slower=tuple(factors(slower, "--slower")),
        hot=tuple(factors(hot, "--hot")),
        search=Search(rounds=rounds, seed=seed),
    )
    different = changes(cluster, compute_scale, slow, kernels, variability, what_if)
    where = executor_named(executor, workers=workers, address=address)
    if len({path.resolve() for path in runs}) < len(runs):
        raise UsageError("a run is given twice; give each size of the job once")
    console = terminal()
    # What is wrong with one is said before anything is drawn.
    found = [recording(run, different, None, None) for run in runs]
    done = [
        _study(own, run.name, asked, where, console) for run, own in zip(runs, found, strict=True)
    ]
    print_studies(console, done)
    print_notes(console, list(dict.fromkeys(n for study in done for n in study.notes)))
    for run, study in zip(runs, done, strict=True):
        save_section(run, "prism", study_json(study, asked.config))


def _study(
    found: Recording, name: str, asked: Experiments, where: Executor, console: Console
) -> PrismStudy:
    """One run's, with a line of progress for each part."""
    reporter = TerminalReporter(console)
    console.print(f"{name}:", markup=False)
    with ExitStack() as parts:

        def stage(part: str) -> StageUpdate:
            parts.close()
            return parts.enter_context(reporter.stage(part))

        return prism_study(found, asked, stage, where)


def study_json(study: PrismStudy, config: MonteCarlo) -> dict[str, Any]:
    """What the command says of one run."""
    placed = study.placement
    return {
        "draws": len(study.drawn.step_ns_D),
        "seed": config.seed,
        "profile": study.profile,
        "world_size": study.world_size,
        "step_without_variation_ns": study.step_ns,
        "quantiles_ns": {f"{q:g}": plain(e) for q, e in study.quantiles.items()},
        "variation_cost": study.growth,
        "slowdown": {f"{factor:g}": plain(e) for factor, e in study.slow.items()},
        "spread": spread_json(study.spread),
        "classes": [plain(a) for a in study.classes.ablations],
        "hot": [plain(h) for h in study.hot],
        "hot_p95_spread": study.hot_spread,
        "placement": {
            "given_ns": placed.given.step_ns,
            "best_ns": placed.best.step_ns,
            "worst_ns": placed.worst.step_ns,
            "tried": placed.tried,
            "exhaustive": placed.exhaustive,
            "factors": [node.factor for node in placed.nodes],
            "tails": [plain(tail) for tail in study.tails],
        },
        "notes": list(study.notes),
    }
