"""``prismscale run``: capture, simulate, run live, report."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prismscale.analysis.result import RunResult
from prismscale.api import DEFAULT_OUT, perform
from prismscale.commands.forecast_options import slow_rank
from prismscale.commands.program_arguments import ModuleOption, ProgramArgument, script_of
from prismscale.config import JobConfig
from prismscale.devices.routing import Routing
from prismscale.devices.stand_in_file import StandInFile
from prismscale.devices.storage import WRITE_BYTES_PER_S, Storage
from prismscale.errors import StuckError, UsageError
from prismscale.graph.parquet import MAX_WORLD_SIZE
from prismscale.progress import TerminalReporter
from prismscale.report.text import print_summary
from prismscale.runfolder import RunFolder

MOST_HANGS = 24
"""Lines of a hang's explanation on the terminal."""


def run(
    program: ProgramArgument = None,
    world_size: Annotated[
        int, typer.Option(help="Ranks of the target job.", show_default=False)
    ] = 0,
    cluster: Annotated[
        str, typer.Option(help="Target cluster: a preset's name or a TOML file.")
    ] = "h100-sxm",
    live: Annotated[
        str, typer.Option(help="Ranks to run live, for example 0,512.", show_default="none")
    ] = "",
    attach: Annotated[
        int | None,
        typer.Option(
            help="Live rank that gets the terminal: breakpoint() asks there.", show_default="none"
        ),
    ] = None,
    module: ModuleOption = "",
    out: Annotated[Path, typer.Option(help="Run folder.")] = DEFAULT_OUT,
    device: Annotated[
        str,
        typer.Option(help="Where programs compute: cpu, cuda, or null (a GPU that is not there)."),
    ] = "cpu",
    clock: Annotated[
        str, typer.Option(help="paced: waits take real time; virtual: they are skipped.")
    ] = "paced",
    steps: Annotated[int, typer.Option(help="Steady steps of each live rank.")] = 8,
    samples: Annotated[int, typer.Option(help="Steady steps measured in each capture.")] = 4,
    watch_steps: Annotated[
        int,
        typer.Option(
            help="Steps in which a null device's program is watched for what happens now and then."
        ),
    ] = 12,
    show: Annotated[
        str, typer.Option(help="More ranks on the timeline.", show_default="one a stage")
    ] = "",
    slow: Annotated[
        list[str] | None,
        typer.Option(help="Make a rank's computation slower: RANK=FACTOR.", show_default=False),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            help="Something is otherwise, for live ranks too: kernel=REGEX xF, overlap=GROUP off, "
            "link=nvlink|network xF, group=GROUP on network|nvlink, recompute=off, dtype=fp8.",
            show_default=False,
        ),
    ] = None,
    hang: Annotated[
        list[str] | None,
        typer.Option(help="Stop a rank for ever: RANK@stepN.", show_default=False),
    ] = None,
    compute_scale: Annotated[float, typer.Option(help="Factor on all measured computation.")] = 1.0,
    kernels: Annotated[
        Path | None,
        typer.Option(
            help="Kernel times measured by profile-kernels, for --device null.",
            show_default="modelled",
        ),
    ] = None,
    fused: Annotated[
        bool,
        typer.Option(
            "--fused",
            help="Lower nothing that torch.compile is asked for: cost elementwise work by a rule "
            "of fusion, on --device null.",
        ),
    ] = False,
    routing: Annotated[
        str,
        typer.Option(
            help="Tokens by expert on --device null: uniform, zipf:S, or a CSV file of loads."
        ),
    ] = "uniform",
    stand_in: Annotated[
        list[str] | None,
        typer.Option(
            help="FILE.py or MODULE=FILE.py: imported in place of an extension that exists only as "
            "a CUDA binary, on --device null; repeatable.",
            show_default=False,
        ),
    ] = None,
    storage: Annotated[
        float, typer.Option(help="GB/s that each rank writes of a checkpoint, on --device null.")
    ] = WRITE_BYTES_PER_S / 1e9,
    step_marker: Annotated[
        str,
        typer.Option(
            help="module:function that ends a step; by default optimizer steps are found.",
            show_default=False,
        ),
    ] = "",
    max_captures: Annotated[int, typer.Option(help="Most ranks to capture.")] = 128,
    capture_timeout: Annotated[float, typer.Option(help="Seconds for one capture.")] = 1800.0,
    values: Annotated[
        str,
        typer.Option(
            help="What other ranks send: answered (made up by rules) or real (all ranks run, a few "
            "at a time)."
        ),
    ] = "answered",
    slots: Annotated[
        int,
        typer.Option(
            help="With --values real, ranks that run at a time.", show_default="one a core"
        ),
    ] = 0,
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Do not track memory.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Redo stages that are done.")] = False,
) -> None:
    """Run any rank of a training job of any world size on this machine.

    Everything after the script's (or module's) name belongs to it.
    """
    console = Console(highlight=False)
    config = JobConfig(
        script=script_of(module, program or [], "prismscale run --world-size N"),
        world_size=_required_world_size(world_size),
        cluster=cluster,
        out=out,
        live=_ranks(live, "--live"),
        attach=attach,
        device=device,
        clock=clock,
        steps=steps,
        samples=samples,
        watched_steps=watch_steps,
        shown=_ranks(show, "--show"),
        step_marker=step_marker or None,
        max_captures=max_captures,
        capture_timeout_s=capture_timeout,
        memory=not no_memory,
        values=values,
        slots=slots,
        fresh=fresh,
        compute_scale=compute_scale,
        kernels=kernels,
        fused=fused,
        routing=Routing.parse(routing),
        stand_ins=tuple(StandInFile.parse(text) for text in stand_in or []),
        storage=Storage(write_bytes_per_s=storage * 1e9),
        slow=dict(slow_rank(s) for s in slow or []),
        hang=dict(_hang(s) for s in hang or []),
        what_ifs=tuple(what_if or ()),
    )
    result = perform(
        config,
        reporter=TerminalReporter(console),
        log_line=lambda rank, line: console.print(f"[rank {rank}] {line}", markup=False),
    )
    folder = RunFolder(root=out)
    print_summary(result, console, folder)
    if result.hung:
        raise StuckError(_hang_text(config, result, folder))


def _hang_text(config: JobConfig, result: RunResult, folder: RunFolder) -> str:
    """Who hangs, and every group that waits, causes first."""
    told = ", ".join(f"rank {r} never begins step {s}" for r, s in sorted(config.hang.items()))
    shown = "\n  ".join(result.hangs[:MOST_HANGS])
    left = len(result.hangs) - MOST_HANGS
    more = f"\n  … and {left:,} more, all of them in {folder.results}" if left > 0 else ""
    groups = f"{len(result.hangs):,} groups wait" if len(result.hangs) > 1 else "one group waits"
    who = f"{groups} for ever:\n  {shown}{more}" if result.hangs else "no group waits for it"
    return f"the job hangs: {told}, and {who}"


def _required_world_size(given: int) -> int:
    if given == 0:
        raise UsageError("--world-size is missing: how many ranks does the target job have?")
    return given


def _ranks(text: str, option: str) -> tuple[int, ...]:
    """``0,8-10`` → (0, 8, 9, 10)."""
    return tuple(_expand(text.split(","), option)) if text else ()


def _expand(parts: Iterable[str], option: str) -> Iterable[int]:
    for part in parts:
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if found is None:
            raise UsageError(f"{option} {part!r} is not a rank; give for example 0,512 or 0-3")
        first, last = int(found[1]), int(found[2] or found[1])
        if not 0 <= last - first < MAX_WORLD_SIZE:
            raise UsageError(f"{option} {part!r} is not a range of ranks; give for example 0-3")
        yield from range(first, last + 1)


def _hang(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)@(?:step)?(\d+)", text)
    if found is None:
        raise UsageError(f"--hang {text!r}: give RANK@stepN, for example 17@step3")
    return int(found[1]), int(found[2])
