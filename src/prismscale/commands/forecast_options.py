"""Options that the forecast commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prismscale.errors import UsageError
from prismscale.forecast.draws.montecarlo import MonteCarlo
from prismscale.forecast.draws.variation import COMMUNICATION_CV, Variation
from prismscale.forecast.recording import Changes
from prismscale.run_options import slow_rank

Run = Annotated[Path, typer.Argument(help="Run folder, captured or imported.")]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Whose model answers for communication not measured.",
        show_default="the run's",
    ),
]
ComputeScale = Annotated[
    float | None,
    typer.Option("--compute-scale", help="Factor on all computation.", show_default="the run's"),
]
Slow = Annotated[
    list[str] | None,
    typer.Option(
        "--slow", help="Ranks whose computation is slower: RANK=FACTOR.", show_default="the run's"
    ),
]
Kernels = Annotated[
    Path | None,
    typer.Option(
        "--kernels", help="Measured kernel times for a null run.", show_default="the run's"
    ),
]
WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        help="Something is otherwise: kernel=REGEX xF, overlap=GROUP off, link=nvlink|network xF, "
        "group=GROUP on network|nvlink, recompute=off, dtype=fp8.",
        show_default="the run's",
    ),
]
Variability = Annotated[
    str,
    typer.Option(
        "--variability", help="recorded: as recorded and assumed; none: every draw the run's step."
    ),
]
Draws = Annotated[int, typer.Option("--draws", help="Monte Carlo draws.")]
Seed = Annotated[int, typer.Option("--seed", help="Of all random numbers.")]
Method = Annotated[
    str,
    typer.Option(
        "--method",
        help="steps: recombine recorded steps; fitted: distributions fitted to pools; auto.",
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps", help="Steps drawn at a time; the last counts.", show_default="as the run needs"
    ),
]
Memory = Annotated[float, typer.Option("--memory", help="GB for draws, in each worker.")]
ExecutorName = Annotated[str, typer.Option("--executor", help="local, serial or ray.")]
Workers = Annotated[int | None, typer.Option("--workers", help="Processes.", show_default="cores")]
Address = Annotated[str | None, typer.Option("--address", help="Of a Ray cluster, or auto.")]
Fuse = Annotated[bool, typer.Option("--fuse/--no-fuse", help="Draw lockstep ranks as one.")]
CommunicationCv = Annotated[
    float,
    typer.Option("--communication-cv", help="Variation of communication that was not measured."),
]
Stalls = Annotated[
    float, typer.Option("--stalls", help="Share of unmeasured communication that stalls, to 10×.")
]

DEFAULT_CV = COMMUNICATION_CV


def draws_config(draws: int, seed: int, steps: int | None, memory_gb: float) -> MonteCarlo:
    """What the options ask for."""
    return MonteCarlo(draws=draws, seed=seed, steps=steps, memory_bytes=int(memory_gb * 1e9))


def assumed(communication_cv: float, stalls: float = 0.0) -> Variation:
    """Variation of what was not measured."""
    return Variation(communication_cv=communication_cv, stall_probability=stalls)


def changes(
    cluster: str | None,
    compute_scale: float | None,
    slow: list[str] | None,
    kernels: Path | None = None,
    what_if: list[str] | None = None,
) -> Changes:
    """What is to be different from the run's own scenario."""
    return Changes(
        cluster=cluster,
        compute_scale=compute_scale,
        slow=dict(slow_rank(text) for text in slow) if slow else None,
        kernels=None if kernels is None else str(kernels),
        what_ifs=tuple(what_if) if what_if else None,
    )


def numbers(text: str, option: str) -> list[int]:
    """``4,8`` as numbers.

    Raises:
        UsageError: something else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: give numbers, for example 4,8") from error


def factors(text: str, option: str) -> list[float]:
    """``1.1,1.5`` as factors.

    Raises:
        UsageError: something else, or a factor that is not positive.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: give factors, for example 1.1,1.5") from error
    if not all(0 < f < 1e6 for f in found):
        raise UsageError(f"{option} {text!r}: factors lie between 0 and 1e6")
    return found
