"""``prismscale export``: a run's graph in formats that others read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from prismscale.analysis.answers import fit_of
from prismscale.analysis.memory.memory_log import load_memory_log, memory_path
from prismscale.analysis.stages import shown_ranks
from prismscale.analysis.wanted import Wanted
from prismscale.commands.forecast_options import ClusterName, Run, numbers
from prismscale.durations.altered import Alteration
from prismscale.durations.node_kernels import NodeKernels
from prismscale.durations.scenario import Scenario
from prismscale.durations.source import DurationSource, FactoredDurations
from prismscale.errors import UsageError
from prismscale.forecast.recording import Recording, load_recording
from prismscale.formats.chakra import write_chakra
from prismscale.formats.kineto.trace_writer import Kernels, no_kernels, write_kineto
from prismscale.formats.memory_snapshot import log_snapshot, write_snapshot
from prismscale.formats.tensorboard_events import write_scalars
from prismscale.progress import terminal
from prismscale.report.folder import read_results
from prismscale.report.titan_scalars import memory_scalars, scalars_of_step
from prismscale.runfolder import RunFolder
from prismscale.sim.timeline import SHOWN_STEPS, Timeline, simulate, simulate_steady

exports = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Write a run's graph for other tools."
)


Ranks = Annotated[str, typer.Option(help="For example 0,8.", show_default="all")]


@exports.command()
def chakra(
    run: Run,
    out: Annotated[Path, typer.Option(help="Folder for PREFIX.RANK.et and comm_group.json.")],
    ranks: Ranks = "",
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
    chosen = _chosen(ranks, graph.world_size, list(range(graph.world_size)))
    timeline, durations = _step(recording, step, chosen)
    paths = write_chakra(graph, timeline, durations, out, prefix=prefix)
    terminal().print(
        f"{len(paths)} ranks written: {out}; a step of {timeline.step_ns / 1e6:,.3f} ms",
        soft_wrap=True,
    )


@exports.command()
def kineto(
    run: Run,
    out: Annotated[Path, typer.Option(help="Folder for PREFIX.RANK.pt.trace.json.gz.")],
    ranks: Annotated[str, typer.Option(help="For example 0,8.", show_default="one a stage")] = "",
    steps: Annotated[int, typer.Option(help="Settled steps to write.", min=1, max=SHOWN_STEPS)] = 1,
    prefix: Annotated[str, typer.Option(help="Of the file names.")] = "rank",
    cluster: ClusterName = None,
) -> None:
    """Write Kineto traces as torch.profiler does, for HolisticTraceAnalysis or TraceLens."""
    recording = load_recording(run, cluster)
    graph, base = recording.samples.graph, recording.base
    chosen = _chosen(ranks, graph.world_size, sorted(shown_ranks(graph)))
    if base.steps is None:
        timeline = simulate_steady(graph, base.durations, ranks=chosen)[0]
    else:
        timeline = simulate(graph, base.durations, steps=base.steps, ranks=chosen)
    paths = write_kineto(
        graph, timeline, out, steps=steps, prefix=prefix, kernels=_kernels(run, recording, cluster)
    )
    terminal().print(
        f"{len(paths)} ranks written: {out}; a step of {timeline.step_ns / 1e6:,.3f} ms",
        soft_wrap=True,
    )


@exports.command()
def memory(
    run: Run,
    out: Annotated[Path, typer.Option(help="File to write, for example memory.pickle.")],
    rank: Annotated[
        int | None,
        typer.Option(help="A captured rank.", show_default="that of the fullest GPU"),
    ] = None,
) -> None:
    """Write a captured rank's memory as torch's snapshot, for pytorch.org/memory_viz."""
    result = read_results(RunFolder(root=run))
    fit = fit_of(result)
    chosen = rank if rank is not None else (fit.rank if fit else 0)
    if chosen not in result.captured:
        known = ", ".join(map(str, result.captured))
        raise UsageError(f"--rank {chosen} was not captured; captured ranks are {known}")
    scenario = Scenario.load(RunFolder(root=run).scenario)
    log = load_memory_log(memory_path(run / scenario.captures, chosen))
    write_snapshot(log_snapshot(log), out)
    terminal().print(
        f"memory of rank {chosen}, {log.n_events:,} events: {out}; drop it on "
        "pytorch.org/memory_viz",
        soft_wrap=True,
    )


@exports.command()
def tensorboard(
    run: Run,
    out: Annotated[Path, typer.Option(help="Folder; each series is a run of TensorBoard in it.")],
    steps: Annotated[int, typer.Option(help="Points of the predicted series.", min=1)] = 100,
    tokens_per_step: Annotated[
        int, typer.Option(help="Of the whole job.", show_default="as found")
    ] = 0,
) -> None:
    """Write scalars with torchtitan's tags: the predicted step, and each live rank's own steps."""
    folder = RunFolder(root=run)
    result = read_results(folder)
    if result.hung:
        raise UsageError(f"the job in {run} hangs: it has no step to log")
    asked = Wanted(tokens_per_step=tokens_per_step)
    series = {"predicted": (result.median_ns,) * steps}
    series |= {f"live-rank-{live.rank}": live.step_ns for live in result.live if live.step_ns}
    memory_told = memory_scalars(folder, result)
    for name, step_ns in series.items():
        told = [memory_told | scalars_of_step(result, ns, asked) for ns in step_ns]
        write_scalars(out / name, told, step_s=[ns / 1e9 for ns in step_ns])
    terminal().print(
        f"{', '.join(series)}: {out}; see them with tensorboard --logdir {out}", soft_wrap=True
    )


def _kernels(run: Path, recording: Recording, cluster: str | None) -> Kernels:
    """What stretches of a null run's work are made of; nothing where the run kept no launches."""
    folder = RunFolder(root=run)
    if not recording.is_captured or not folder.scenario.is_file():
        return no_kernels
    own = Scenario.load(folder.scenario)
    if own.kernel_costs is None or not (run / own.captures).is_dir():
        return no_kernels
    alteration = Alteration(scenario=own.changed(cluster=cluster), root=run, stored=own)
    known = NodeKernels(recosting=alteration.recosting)
    return lambda rank_class, node: known.of(rank_class.trace, node)


def _chosen(text: str, world_size: int, otherwise: list[int]) -> list[int]:
    """The ranks that ``--ranks`` names."""
    chosen = numbers(text, "--ranks") if text else otherwise
    if any(not 0 <= r < world_size for r in chosen):
        raise UsageError(f"--ranks {text}: there are ranks 0 … {world_size - 1}")
    return chosen


def _step(
    recording: Recording, step: int | None, ranks: Sequence[int]
) -> tuple[Timeline, DurationSource]:
    """The step to be written, at the end of a timeline, with the durations that it was timed
    with: the run's own, or a recorded one by itself."""
    graph, base = recording.samples.graph, recording.base
    if step is not None:
        durations = FactoredDurations(
            graph=graph, durations=recording.samples.durations(step), factor_R=base.factor_R
        )
        return simulate(graph, durations, steps=1, ranks=ranks), durations
    if base.steps is None:
        return simulate_steady(graph, base.durations, ranks=ranks)[0], base.durations
    return simulate(graph, base.durations, steps=base.steps, ranks=ranks), base.durations
