"""``prismscale calibrate``: a cluster file from measurements, made here or brought along."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from prismscale.cluster import Cluster
from prismscale.errors import FormatError, UsageError
from prismscale.files import write_text
from prismscale.formats.nccl_tests import measured_from, parse_nccl_tests
from prismscale.progress import TerminalReporter, terminal

calibrate = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Write a cluster file from measurements."
)


@calibrate.command()
def collectives(
    out: Annotated[Path, typer.Option(help="TOML file to write.")] = Path("loopback-gloo.toml"),
    world_size: Annotated[int, typer.Option(help="Processes that communicate.")] = 2,
    max_bytes: Annotated[int, typer.Option(help="Largest message.")] = 64 << 20,
) -> None:
    """Measure gloo collectives between processes of this machine; use the file as --cluster."""
    # Imported here: torch takes seconds, and no other command line needs it.
    from prismscale.measure.collectives import DEFAULT_SIZES, measure_collectives

    console = terminal()
    sizes = [s for s in DEFAULT_SIZES if s <= max_bytes]
    with TerminalReporter(console).stage("calibrate") as update:
        measure_collectives(
            world_size=world_size,
            sizes=sizes,
            out=out,
            progress=lambda _, share: update(round(share * 100), 100),
        )
    console.print(f"written: {out}; use it with --cluster {out}")


@calibrate.command("nccl-tests")
def nccl_tests(
    outputs: Annotated[
        list[Path],
        typer.Argument(help="What all_reduce_perf … printed."),
    ],
    cluster: Annotated[str, typer.Option(help="Preset or TOML file of the same GPUs.")],
    out: Annotated[Path, typer.Option(help="TOML file to write.")] = Path("measured.toml"),
) -> None:
    """Put the figures of nccl-tests into a cluster file; they go before modelled ones."""
    base = Cluster.load(cluster)
    rows = [row for path in outputs for row in parse_nccl_tests(_text(path))]
    measured = measured_from(rows, machine=base.name, date=datetime.now(tz=UTC).date().isoformat())
    if not measured.curves:
        raise FormatError("only rows of single ranks; run nccl-tests with two ranks or more")
    write_text(out, replace(base, name=out.stem, measured=measured).to_toml())
    console = terminal()
    for curve in measured.curves:
        console.print(
            f"{curve.op.spelling}: {curve.group_size} ranks on {curve.nodes} nodes, "
            f"{len(curve.n_bytes)} sizes"
        )
    console.print(f"written: {out}; use it with --cluster {out}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}") from error
