"""``prismscale import``: a graph and step samples from traces that others recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from prismscale.durations.samples import StepSamples
from prismscale.durations.samples_io import save_samples
from prismscale.errors import UsageError
from prismscale.formats.chakra import read_chakra
from prismscale.formats.imported import ImportedTrace
from prismscale.formats.kineto import read_kineto
from prismscale.formats.straggler import read_straggler
from prismscale.progress import terminal
from prismscale.runfolder import RunFolder
from prismscale.sim.program import compile_job
from prismscale.sim.timeline import simulate

MOST_REPAIRS = 12
"""Lines of repairs on the terminal."""

imports = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Make a run folder from traces that others recorded.",
)

Out = Annotated[Path, typer.Option(help="Run folder to write.")]


@imports.command()
def straggler(
    trace: Annotated[Path, typer.Argument(help="trace-NAME.parquet")],
    out: Out = Path("runs/imported"),
    meta: Annotated[
        Path | None, typer.Option(help="meta-NAME.yaml", show_default="beside the trace")
    ] = None,
) -> None:
    """Import a ByteDance straggler trace: all workers of a data × pipeline parallel job."""
    _write(read_straggler(_existing(trace), meta=None if meta is None else _existing(meta)), out)


@imports.command()
def kineto(
    traces: Annotated[list[Path], typer.Argument(help="One .json, .json.gz a rank, or a .tar.gz")],
    out: Out = Path("runs/imported"),
) -> None:
    """Import torch.profiler traces of the same steps of one or several ranks."""
    _write(read_kineto([_existing(t) for t in traces]), out)


@imports.command()
def chakra(
    traces: Annotated[list[Path], typer.Argument(help="PREFIX.RANK.et of every rank")],
    out: Out = Path("runs/imported"),
) -> None:
    """Import Chakra execution traces of every rank of a job."""
    graph = read_chakra([_existing(t) for t in traces])
    _write(ImportedTrace(samples=StepSamples.from_graph(graph), repairs=()), out)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    return path


def _write(imported: ImportedTrace, out: Path) -> None:
    console = terminal()
    samples = imported.samples
    with RunFolder(root=out).opened(fresh=True) as folder:
        save_samples(samples, folder.graph)
    console.print(
        f"{samples.graph.world_size} ranks in {len(samples.graph.classes)} classes, "
        f"{samples.graph.n_rank_nodes:,} nodes a step, {samples.n_steps} steps"
    )
    for line in imported.repairs[:MOST_REPAIRS]:
        console.print(Text.assemble(("mended:", "yellow"), f" {line}"))
    if len(imported.repairs) > MOST_REPAIRS:
        console.print(f"… and {len(imported.repairs) - MOST_REPAIRS} more")
    _print_replay(console, samples)
    console.print(f"written: {out}; continue with: prismscale forecast {out}")


def _print_replay(console: Console, samples: StepSamples) -> None:
    """Re-time the recorded steps: what was recorded must come out again."""
    program = compile_job(samples.graph)
    replayed = np.array(
        [
            simulate(samples.graph, samples.durations(t), steps=1, program=program).step_ns
            for t in range(samples.n_steps)
        ]
    )
    line = f"re-timed step: median {np.median(replayed) / 1e6:,.3f} ms"
    recorded = samples.observed_step_ns_T
    if recorded is not None:
        off = np.abs(replayed / np.maximum(recorded, 1) - 1).max() * 100
        line += f" (recorded {np.median(recorded) / 1e6:,.3f} ms, most off by {off:.4f} %)"
    console.print(line)
