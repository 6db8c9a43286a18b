"""``prismscale calibrate``: measure this machine and write a preset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from prismscale.progress import TerminalReporter

calibrate = typer.Typer(no_args_is_help=True, help="Measure this machine and write a preset.")


@calibrate.callback()
def _group() -> None:
    """Keeps ``collectives`` a sub-command while it is the only one."""


@calibrate.command()
def collectives(
    out: Annotated[Path, typer.Option(help="TOML file to write.")] = Path("loopback-gloo.toml"),
    world_size: Annotated[int, typer.Option(help="Processes that communicate.")] = 2,
    max_bytes: Annotated[int, typer.Option(help="Largest message.")] = 64 << 20,
) -> None:
    """Measure gloo collectives between processes of this machine; use the file as --cluster."""
    # Imported here: torch takes seconds, and no other command line needs it.
    from prismscale.measure.collectives import DEFAULT_SIZES, measure_collectives

    console = Console(highlight=False)
    sizes = [s for s in DEFAULT_SIZES if s <= max_bytes]
    with TerminalReporter(console).stage("calibrate") as update:
        measure_collectives(
            world_size=world_size,
            sizes=sizes,
            out=out,
            progress=lambda _, share: update(round(share * 100), 100),
        )
    console.print(f"written: {out}; use it with --cluster {out}")
