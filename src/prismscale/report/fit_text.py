"""The output of ``prismscale fit`` for people: on a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from prismscale.analysis.fit_result import FitResult, StageMemory, Variant
from prismscale.analysis.known_errors import known_error
from prismscale.analysis.memory.memory_kinds import KindShare
from prismscale.report.answer_rows import AnswerRow, fit_row, headroom
from prismscale.report.markdown import escaped, heading, table
from prismscale.report.units import counted, percent, seconds, size

MOST_PLACES, MOST_SITES, MOST_STAGES = 3, 8, 12
_TABLE: dict[str, Any] = {
    "box": SIMPLE_HEAD,
    "show_edge": False,
    "header_style": "dim",
    "padding": (0, 1),
    "pad_edge": False,
}


def print_fit(result: FitResult, console: Console) -> None:
    """Print the verdict, what holds the memory, and the effect of each change."""
    blocks: list[RenderableType] = [_headline(result)]
    fullest = result.given.fullest
    if fullest is not None:
        blocks.append(_kinds_table(result, fullest))
        blocks.append(_sites_table(fullest))
    if len(result.given.stages) > 1:
        blocks.append(_stages_table(result))
    if len(result.variants) > 1:
        blocks.append(_variants_table(result))
    console.print()
    for block in blocks:
        console.print(Padding(block, (0, 0, 1, 1)))


def fit_markdown(result: FitResult, unmet: Sequence[str] = ()) -> str:
    """Return the result as Markdown, for a comment on a pull request."""
    fit = result.given.fit(result.capacity_bytes)
    where = f"{counted(result.world_size, 'rank')} on {result.cluster}"
    lines = heading(where, result.command, fit is not None and fit.fits, unmet)
    lines += table(_answers(result))
    if unseen := [f"- not seen: {escaped(said)}" for said in _reservations(result.given)]:
        lines += [*unseen, ""]
    if result.given.fullest is not None:
        lines += table([AnswerRow(*row) for row in _kind_rows(result, result.given.fullest)])
    if len(result.variants) > 1:
        lines += table([AnswerRow(*row[:3]) for row in _variant_rows(result)][1:])
    return "\n".join(lines).rstrip() + "\n"


def _answers(result: FitResult) -> list[AnswerRow]:
    fit = result.given.fit(result.capacity_bytes)
    rows = [] if fit is None else [fit_row(fit)]
    known = known_error("reserved", result.cluster)
    if known is not None:
        rows.append(
            AnswerRow(
                "Error",
                f"reserved {percent(known.median)} (worst {percent(known.worst)})",
                f"in {counted(known.cases, 'measured run')}",
            )
        )
    return rows


def _reservations(given: Variant) -> Iterator[str]:
    """Yield what was not captured, and so is not covered by the verdict."""
    if any(stage.steps == 1 for stage in given.stages):
        yield "the program made one step and ended; its next one may need more memory"
    for first, last in given.between:
        said = f"stages {first} to {last}" if last > first else f"stage {first}"
        yield f"{said} not captured: taken to be no fuller than the one before (--capture)"


def _headline(result: FitResult) -> RenderableType:
    where = f"{counted(result.world_size, 'rank')} on {result.cluster}"
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in _answers(result):
        answer = Text(row.answer, style="bold red" if row.is_bad else "bold green")
        grid.add_row(row.name, answer.append(f"; {row.detail}", style="dim"))
    if result.given.ran_out:
        grid.add_row("It said", Text(result.given.ran_out.strip().splitlines()[-1], style="red"))
    for said in _reservations(result.given):
        grid.add_row("Not seen", Text(said, style="yellow"))
    stages = counted(len(result.given.stages), "rank")
    grid.add_row("This took", Text(f"{seconds(result.wall_s)}: {stages} captured", style="dim"))
    command = Text(result.command, style="dim", no_wrap=True, overflow="ellipsis")
    return Group(Rule(Text(where, style="bold"), align="left", style="dim"), command, "", grid)


def _kinds_table(result: FitResult, stage: StageMemory) -> RenderableType:
    found = Table(**_TABLE)
    found.add_column("", no_wrap=True)
    found.add_column("", justify="right", no_wrap=True)
    found.add_column("most of it in", overflow="fold")
    for name, held, places in _kind_rows(result, stage):
        found.add_row(name, held, Text(places, style="dim"))
    when = f"step {stage.peak.step}, {stage.peak.when}" if stage.peak.step else "the start"
    title = f"What holds the memory of rank {stage.rank} when most is allocated ({when})"
    return Group(Text(title, style="bold"), found)


def _kind_rows(result: FitResult, stage: StageMemory) -> Iterator[tuple[str, str, str]]:
    for share in stage.peak.kinds:
        yield share.kind, size(share.n_bytes), _places(share)
    reserved = stage.record.reserved_bytes or 0
    yield "allocated", size(stage.peak.allocated_bytes), ""
    between = reserved - stage.peak.allocated_bytes
    yield "fragmentation", size(between), "reserved by torch, and not allocated then"
    for part in stage.outside:
        yield part.name, size(part.n_bytes), "outside torch, by assumed sizes of buffers"
    yield "held", size(stage.held_bytes), f"of {size(result.capacity_bytes)}"


def _places(share: KindShare) -> str:
    named = [f"{place.name} {size(place.n_bytes)}" for place in share.places[:MOST_PLACES]]
    return ", ".join(named)


def _sites_table(stage: StageMemory) -> RenderableType:
    rows = [(site, share.kind) for share in stage.peak.kinds for site in share.sites]
    rows.sort(key=lambda row: -row[0].n_bytes)
    found = Table(**_TABLE)
    found.add_column("", justify="right", no_wrap=True)
    found.add_column("kind", no_wrap=True)
    found.add_column("line of the program", overflow="fold")
    for site, kind in rows[:MOST_SITES]:
        found.add_row(size(site.n_bytes), kind, site.name)
    return Group(Text("Lines that asked for most of it", style="bold"), found)


def _stages_table(result: FitResult) -> RenderableType:
    found = Table(**_TABLE)
    for head in ("", "rank", "allocated", "reserved", "outside", "held", "free"):
        found.add_column(head, justify="right" if head else "left", no_wrap=True)
    stages = sorted(result.given.stages, key=lambda stage: -stage.held_bytes)[:MOST_STAGES]
    for stage in stages:
        figures = (
            stage.record.peak_bytes,
            stage.record.reserved_bytes or 0,
            stage.outside_bytes,
            stage.held_bytes,
            result.capacity_bytes - stage.held_bytes,
        )
        found.add_row(stage.name, str(stage.rank), *map(size, figures))
    left = len(result.given.stages) - len(stages)
    note = [Text(f"and {counted(left, 'stage')} with less", style="dim")] if left else []
    return Group(Text("Stages, fullest first", style="bold"), found, *note)


def _variants_table(result: FitResult) -> RenderableType:
    found = Table(**_TABLE)
    found.add_column("", overflow="fold")
    found.add_column("fits", no_wrap=True)
    found.add_column("held, and free", overflow="fold")
    for change, verdict, figures in _variant_rows(result):
        style = {"yes": "green", "no": "red"}.get(verdict, "yellow")
        found.add_row(change, Text(verdict, style=style), figures)
    return Group(Text("With a change", style="bold"), found)


def _variant_rows(result: FitResult) -> Iterator[tuple[str, str, str]]:
    for variant in result.variants:
        yield (variant.change or "as given", *_verdict(variant, result.capacity_bytes))


def _verdict(variant: Variant, capacity_bytes: int) -> tuple[str, str]:
    fit = variant.fit(capacity_bytes)
    if fit is None:
        return "?", variant.refused
    figures = f"{size(fit.held_bytes)}, {headroom(fit)}"
    return ("yes" if fit.fits else "no"), f"{figures} (reserved {size(fit.reserved_bytes)})"
