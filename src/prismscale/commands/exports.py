"""``prismscale export``: a run's graph in formats that others read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prismscale.commands.forecast_options import ClusterName, Run, numbers
from prismscale.errors import UsageError
from prismscale.forecast.recording import load_recording
from prismscale.formats.chakra import write_chakra
from prismscale.sim.timeline import simulate

exports = typer.Typer(no_args_is_help=True, help="Write a run's graph for other tools.")


@exports.callback()
def _group() -> None:
    """Keeps ``chakra`` a sub-command while it is the only one."""


@exports.command()
def chakra(
    run: Run,
    out: Annotated[Path, typer.Option(help="Folder for PREFIX.RANK.et and comm_group.json.")],
    ranks: Annotated[str, typer.Option(help="For example 0,8.", show_default="all")] = "",
    step: Annotated[int, typer.Option(help="Which recorded step, from 0.")] = 0,
    prefix: Annotated[str, typer.Option(help="Of the file names.")] = "trace",
    cluster: ClusterName = None,
) -> None:
    """Write Chakra execution traces with start times: one re-timed step of each rank."""
    samples = load_recording(run, cluster).samples
    world = samples.graph.world_size
    chosen = numbers(ranks, "--ranks") if ranks else list(range(world))
    unknown = [r for r in chosen if not 0 <= r < world]
    if unknown:
        raise UsageError(f"--ranks {ranks}: there are ranks 0 … {world - 1}")
    durations = samples.durations(step)
    timeline = simulate(samples.graph, durations, steps=1, ranks=chosen)
    paths = write_chakra(samples.graph, timeline, durations, out, prefix=prefix)
    Console(highlight=False).print(
        f"{len(paths)} ranks written: {out}; a step of {timeline.step_ns / 1e6:,.3f} ms",
        soft_wrap=True,
    )
