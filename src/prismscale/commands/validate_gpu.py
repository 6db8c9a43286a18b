"""``prismscale validate gpu``: a user's program, emulated and plain, on the GPU of this machine."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prismscale.emulation.script import Script
from prismscale.errors import UsageError
from prismscale.files import write_json
from prismscale.program_arguments import ModuleOption, ProgramArgument, script_of
from prismscale.progress import TerminalReporter, terminal
from prismscale.validation.gpu_items import DEFAULT_ITEMS, ITEMS, GpuItem, chosen_items
from prismscale.validation.gpu_runs import GpuRuns, preset_of
from prismscale.validation.rows import Row, print_rows


def validate_gpu(
    program: ProgramArgument = None,
    module: ModuleOption = "",
    items: Annotated[
        str, typer.Option(help=f"What to measure, with commas between: {', '.join(ITEMS)}.")
    ] = DEFAULT_ITEMS,
    out: Annotated[Path, typer.Option(help="Folder for ITEM.json of each item, and logs.")] = Path(
        "gpu-validation"
    ),
) -> None:
    """Hold the emulation of a training script against the same script run plainly on this GPU.

    Missed bars are shown, and exit with 1. Everything after the script's name belongs to the
    script. It must train on cuda, and take 40 optimizer steps or more.

    run: the emulated script at world sizes 1, 8 and 1,024, rank 0 live: step, lag, peak memory.

    overhead: the emulated against the plain script, taking turns: ratio of step times.

    memory: 2 and 4 real processes on this GPU, through gloo, against a live rank: peak bytes.

    null: the plain script against the null device: peak bytes, operations called, time of a step.

    release: how late held streams go on, asked for 50 µs to 50 ms; any script does.

    The figures of prismscale itself are of examples/llama/train.py in its repository, with the
    command lines of docs/gpu.md: --model 1b for run and overhead, --model 160m for memory and null.
    """
    chosen = chosen_items(items)
    script = script_of(module, program or [], "prismscale validate gpu")
    # Imported here: torch takes seconds, and a wrong option is told without it.
    from prismscale.devices.cuda import require_cuda
    from prismscale.measure.gpu_machine import describe_machine

    try:
        require_cuda()
    except UsageError as error:
        raise UsageError(f"nothing was measured: {error}") from None
    about = describe_machine(shlex.join(["prismscale", *sys.argv[1:]]))
    console = terminal()
    met = True
    for name, item in chosen.items():
        rows = _measure(name, item, script, out, preset_of(about["gpu"]), console)
        print_rows(rows, title=f"{name}, {about['gpu']}")
        write_result(out / f"{name}.json", about, rows)
        met &= all(row.ok for row in rows)
    console.print(f"written: {out}", markup=False, soft_wrap=True)
    if not met:
        raise typer.Exit(1)


def _measure(
    name: str, item: GpuItem, script: Script, out: Path, cluster: str, console: Console
) -> list[Row]:
    with (
        tempfile.TemporaryDirectory() as scratch,
        TerminalReporter(console).stage(name) as update,
    ):
        update(0, item.runs)
        return item.measure(
            GpuRuns(
                script=script,
                scratch=Path(scratch),
                logs=out / "logs" / name,
                cluster=cluster,
                total=item.runs,
                update=update,
            )
        )


def write_result(path: Path, about: Mapping[str, str], rows: list[Row]) -> None:
    """One item's figures and where they come from.

    Raises:
        StorageError: the file cannot be written.
    """
    write_json(path, {**about, "rows": [asdict(row) for row in rows]})
