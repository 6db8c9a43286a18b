"""``prismscale export``: a run's graph in formats that others read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prismscale.commands.forecast_options import ClusterName, Run, numbers
from prismscale.durations.source import DurationSource
from prismscale.errors import UsageError
from prismscale.forecast.recording import Recording, load_recording
from prismscale.formats.chakra import write_chakra
from prismscale.sim.timeline import Timeline, simulate, simulate_steady

exports = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Write a run's graph for other tools."
)


@exports.callback()
def _group() -> None:
    """Keeps ``chakra`` a sub-command while it is the only one."""


@exports.command()
def chakra(
    run: Run,
    out: Annotated[Path, typer.Option(help="Folder for PREFIX.RANK.et and comm_group.json.")],
    ranks: Annotated[str, typer.Option(help="For example 0,8.", show_default="all")] = "",
    step: Annotated[
        int | None,
        typer.Option(help="Which recorded step, from 0.", show_default="the run's own"),
    ] = None,
    prefix: Annotated[str, typer.Option(help="Of the file names.")] = "trace",
    cluster: ClusterName = None,
) -> None:
    """Write Chakra execution traces with start times: one re-timed step of each rank."""
    recording = load_recording(run, cluster)
    graph = recording.samples.graph
    chosen = numbers(ranks, "--ranks") if ranks else list(range(graph.world_size))
    unknown = [r for r in chosen if not 0 <= r < graph.world_size]
    if unknown:
        raise UsageError(f"--ranks {ranks}: there are ranks 0 … {graph.world_size - 1}")
    timeline, durations = _step(recording, step, chosen)
    paths = write_chakra(graph, timeline, durations, out, prefix=prefix)
    Console(highlight=False).print(
        f"{len(paths)} ranks written: {out}; a step of {timeline.step_ns / 1e6:,.3f} ms",
        soft_wrap=True,
    )


def _step(
    recording: Recording, step: int | None, ranks: Sequence[int]
) -> tuple[Timeline, DurationSource]:
    """The step to be written, at the end of a timeline, with the durations that it was timed
    with: the run's own, or a recorded one by itself."""
    graph, base = recording.samples.graph, recording.base
    if step is not None:
        durations = recording.samples.durations(step)
        return simulate(graph, durations, steps=1, ranks=ranks), durations
    if base.steps is None:
        return simulate_steady(graph, base.durations, ranks=ranks)[0], base.durations
    return simulate(graph, base.durations, steps=base.steps, ranks=ranks), base.durations
