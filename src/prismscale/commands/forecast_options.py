"""Options that the forecast commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prismscale.durations.slow_ranks import slow_ranks
from prismscale.errors import UsageError
from prismscale.forecast.draws.montecarlo import MonteCarlo
from prismscale.forecast.draws.variation import COMMUNICATION_CV, Variation
from prismscale.forecast.recording import Changes, Recording, load_recording
from prismscale.run_options import n_bytes

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
        "--slow",
        help="Ranks whose computation is slower: RANK=FACTOR, 8-15=FACTOR, or @FILE of such lines.",
        show_default="the run's",
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
        help="Something is otherwise: kernel=REGEX xF, host=xF, overlap=GROUP off, "
        "link=nvlink|network xF, group=GROUP on network|nvlink, links=shared, compute=shared, "
        "recompute=off, dtype=fp8.",
        show_default="the run's",
    ),
]
Variability = Annotated[
    str | None,
    typer.Option(
        "--variability",
        help="A profile for a null run: a preset's name or a TOML file; recorded: as recorded and "
        "assumed; none: every draw the run's step.",
        show_default="the run's profile, else recorded",
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
    float | None,
    typer.Option(
        "--communication-cv",
        help="Variation of communication that was not measured, without a profile.",
        show_default=f"{COMMUNICATION_CV}",
    ),
]
Stalls = Annotated[
    float | None,
    typer.Option(
        "--stalls",
        help="Share of unmeasured communication that stalls, to 10×, without a profile.",
        show_default="none",
    ),
]

TrainSteps = Annotated[int, typer.Option("--train-steps", help="Steps of the whole training.")]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", help="Machines that can fail.", show_default="the run's"),
]
Failures = Annotated[
    str | None,
    typer.Option(
        "--failures",
        help="How often machines fail: a published fleet (llama3-405b, rsc-1, rsc-2), a TOML file, "
        "or none.",
        show_default="llama3-405b on GPUs",
    ),
]
MtbfHours = Annotated[
    float | None,
    typer.Option("--mtbf-hours", help="Between failures of one node.", show_default="the fleet's"),
]
CheckpointS = Annotated[
    float | None,
    typer.Option(
        "--checkpoint-s", help="To write a checkpoint.", show_default="the program's, else 60"
    ),
]
RestartS = Annotated[float, typer.Option("--restart-s", help="From a failure to the first step.")]
ReplaceS = Annotated[
    float, typer.Option("--replace-s", help="What putting in another node adds to that.")
]
Spares = Annotated[
    int | None, typer.Option("--spares", help="Nodes that stand ready.", show_default="enough")
]
RepairHours = Annotated[
    float, typer.Option("--repair-hours", help="Until a node that failed is a spare again.")
]
IntervalS = Annotated[
    float | None,
    typer.Option("--interval-s", help="Between checkpoints.", show_default="Daly's optimum"),
]


def draws_config(draws: int, seed: int, steps: int | None, memory_gb: float) -> MonteCarlo:
    """What the options ask for."""
    memory_bytes = n_bytes("--memory", memory_gb, 10**9)
    return MonteCarlo(draws=draws, seed=seed, steps=steps, memory_bytes=memory_bytes)


def assumed(communication_cv: float | None, stalls: float | None = None) -> Variation:
    """Variation of what was not measured, where no profile says it."""
    cv = COMMUNICATION_CV if communication_cv is None else communication_cv
    return Variation(communication_cv=cv, stall_probability=stalls or 0.0)


def recording(
    run: Path, asked: Changes, communication_cv: float | None, stalls: float | None
) -> Recording:
    """The run with what is to be different.

    Raises:
        UsageError: see :func:`load_recording`; or constants beside a profile.
    """
    found = load_recording(run, changes=asked, variation=assumed(communication_cv, stalls))
    for option, value in (("--communication-cv", communication_cv), ("--stalls", stalls)):
        if value is not None and not found.modelled:
            raise UsageError(
                f"{option} is for communication whose duration a model says; all of this run's was "
                "measured, and varies as it was recorded"
            )
        if value is not None and found.modelled_job is not None:
            raise UsageError(
                f"{option} is a constant in place of a profile, and this run has one "
                f"('{found.modelled_job.profile.name}'): add --variability recorded, or write "
                "a profile of your own"
            )
    return found


def changes(
    cluster: str | None,
    compute_scale: float | None,
    slow: list[str] | None,
    kernels: Path | None = None,
    variability: str | None = None,
    what_if: list[str] | None = None,
) -> Changes:
    """What is to be different from the run's own scenario."""
    return Changes(
        cluster=cluster,
        compute_scale=compute_scale,
        slow=slow_ranks(slow) if slow else None,
        kernels=None if kernels is None else str(kernels),
        what_ifs=tuple(what_if) if what_if else None,
        variability=variability,
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
