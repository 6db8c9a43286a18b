"""``prismscale health``: this node's line in the CSV that ``prismscale place --nodes`` reads."""

from __future__ import annotations

import csv
import io
import platform
from pathlib import Path
from typing import Annotated

import typer

from prismscale.errors import FormatError, UsageError
from prismscale.files import locked, write_text
from prismscale.progress import terminal
from prismscale.report.units import counted
from prismscale.typed_files import text_of

HEADER = ("node", "seconds")


def health(
    out: Annotated[Path, typer.Argument(help="CSV; a line is added, or this node's renewed.")],
    device: Annotated[str, typer.Option(help="cpu, or cuda: the slowest GPU counts.")] = "cpu",
    name: Annotated[str, typer.Option(help="Of this node.", show_default="its host name")] = "",
) -> None:
    """Time the same matrix product on this node; run it on every node, with one CSV."""
    # torch is imported by the commands that need it alone.
    from prismscale.measure.node_speed import check_seconds

    _read(out)  # a file that is no such list is refused before anything is timed
    node = name or platform.node()
    seconds = check_seconds(device)
    # Nodes may share the file, and end at the same time.
    with locked(out):
        known = _read(out) | {node: seconds}
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([HEADER, *((n, f"{s:.9g}") for n, s in known.items())])
        write_text(out, text.getvalue())
    terminal().print(
        f"{node}: {seconds * 1e3:,.3f} ms; {counted(len(known), 'node')} in {out}", soft_wrap=True
    )


def _read(path: Path) -> dict[str, float]:
    if not path.exists():
        return {}
    try:
        rows = list(csv.reader(text_of(path).splitlines()))
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error}") from error
    try:
        if not rows or tuple(rows[0]) != HEADER:
            raise ValueError(f"its first line is not {','.join(HEADER)}")
        return {node: float(seconds) for node, seconds in rows[1:]}
    except ValueError as error:
        raise FormatError(
            f"{path} is no list of health checks ({error}); choose another file"
        ) from error
