"""``prismscale compare``: what differs between runs, and why."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from prismscale.analysis.comparison import ComparedFigure, ComparedPart, Measure, compare
from prismscale.analysis.result import RunResult
from prismscale.commands.compare.compare_page import comparison_page
from prismscale.errors import UsageError
from prismscale.files import write_text
from prismscale.progress import Terminal, terminal
from prismscale.report.folder import read_results
from prismscale.report.units import duration, signed_percent, size
from prismscale.runfolder import RunFolder

MOST_FIGURES = 12
"""Rows of a part on the terminal."""


def compare_runs(
    runs: Annotated[
        list[Path], typer.Argument(help="Two or more run folders; the first is the base.")
    ],
    html: Annotated[
        Path | None, typer.Option(help="Write the comparison as a page.", show_default="none")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say what differs between runs in time, memory and communication, by cause."""
    if len(runs) < 2:
        raise UsageError("compare takes two or more run folders")
    results = [read_results(RunFolder(root=run)) for run in runs]
    names = _names(runs)
    parts = compare(results)
    if html is not None:
        write_text(html, comparison_page(names, results, parts))
    if as_json:
        typer.echo(json.dumps({"runs": names, "parts": [_plain(part) for part in parts]}, indent=2))
        return
    _print(terminal(), names, results, parts)
    if html is not None:
        terminal().print(f"written: {html}", soft_wrap=True)


def _names(runs: list[Path]) -> list[str]:
    """The folders' own names, with their parents' where they are the same."""
    short = [run.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run) for run in runs]


def _plain(part: ComparedPart) -> dict[str, object]:
    figures = [asdict(f) | {"measure": f.measure.value} for f in part.figures]
    return {"title": part.title, "figures": figures}


def _print(
    console: Terminal, names: list[str], results: list[RunResult], parts: list[ComparedPart]
) -> None:
    for name, result in zip(names, results, strict=True):
        console.print(f"{name}: {result.command} ({result.cluster})", soft_wrap=True)
    for part in parts:
        console.print()
        console.print(part.title, style="bold")
        table = Table(
            Column(""),
            *(Column(name, justify="right") for name in names),
            *(Column("difference", justify="right") for _ in names[1:]),
            box=None,
            pad_edge=False,
        )
        for figure in part.figures[:MOST_FIGURES]:
            table.add_row(figure.name, *cells(figure))
        console.print(table)
        if len(part.figures) > MOST_FIGURES:
            console.print(f"… and {len(part.figures) - MOST_FIGURES} more that differ less")
        if part.note:
            console.print(part.note, style="dim")


def cells(figure: ComparedFigure) -> list[str]:
    """The values of a figure, then how far each lies from the first."""
    shown = [_shown(figure.measure, value) for value in figure.values]
    return [*shown, *(_difference(figure, n) for n in range(1, len(figure.values)))]


def _shown(measure: Measure, value: float | None) -> str:
    if value is None:
        return "–"
    if measure is Measure.TIME:
        return duration(value)
    return size(value) if measure is Measure.BYTES else f"{value:,.0f}"


def _difference(figure: ComparedFigure, n: int) -> str:
    first, value = figure.values[0], figure.differences[n - 1]
    if first is None or value is None:
        return "–"
    if value == 0:
        return "="
    sign = "+" if value > 0 else "−"
    text = f"{sign}{_shown(figure.measure, abs(value))}"
    return f"{text} ({signed_percent(value / first)})" if first else text
