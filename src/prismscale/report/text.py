"""The summary of a run on the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from prismscale.analysis.answers import Answers, answers
from prismscale.analysis.result import RunResult, StageResult
from prismscale.report.answer_rows import answer_rows
from prismscale.report.kernels import (
    call_rows,
    coverage_sentence,
    kind_rows,
    stand_in_sentences,
)
from prismscale.report.remarks import (
    class_sentences,
    difference,
    event_name,
    event_source,
    live_peak,
    outside_sentence,
    part_names,
    parts_of,
    payload_sentences,
    router_sentences,
    transfer_rows,
    value_sentences,
    variability_sentence,
    warnings_of,
    watched_sentence,
)
from prismscale.report.units import (
    Scale,
    counted,
    duration,
    percent,
    seconds,
    signed_percent,
    size,
)
from prismscale.runfolder import RunFolder

MOST_COLUMNS = 4
MOST_KINDS, MOST_CALLS = 8, 4
STYLES = {"computation": "cyan", "communication": "yellow", "waiting": "bright_black"}


def print_summary(
    result: RunResult,
    console: Console,
    folder: RunFolder | None = None,
) -> None:
    """Print the summary of ``result``, at most as wide as ``console``, beginning with the answers.

    Args:
        result: result of the run.
        console: console to print on.
        folder: folder of the files that are listed; None: no files are listed.
    """
    blocks: list[RenderableType] = [_headline(result), _stage_table(result)]
    if result.notable_events:
        blocks.append(_event_table(result))
    if result.live:
        blocks.append(_live_table(result))
    if result.kernels:
        blocks.append(_kernel_table(result, console.width))
    blocks.append(_notes(result, folder))
    console.print()
    for block in blocks:
        console.print(Padding(block, (0, 0, 1, 1)))


def _answers(result: RunResult, found: Answers) -> RenderableType:
    """Return a row for each question: its answer, followed by the detail."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in answer_rows(result, found):
        answer = Text(row.answer, style="bold red" if row.is_bad else "bold green")
        if row.detail:
            answer.append("; " if row.answer else "", style="dim").append(row.detail, style="dim")
        grid.add_row(row.name, answer)
    return grid


def _headline(result: RunResult) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    where = f"{counted(result.world_size, 'rank')} on {result.cluster}"
    grid.add_row(Rule(Text(where, style="bold"), align="left", style="dim"))
    grid.add_row(Text(result.command, style="dim"))
    grid.add_row("")
    if result.hung:
        grid.add_row(Text("The step never ends: the job hangs.", style="bold red"))
        return grid
    grid.add_row(_answers(result, answers(result)))
    return grid


@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    """One column of the stage table: a stage, or several stages as their mean."""

    head: str
    stages: tuple[StageResult, ...]

    def part_ns(self, kind: str, name: str) -> float:
        """Return the mean time of one part of the step."""
        found = (p.ns for s in self.stages for p in parts_of(s.breakdown))
        keys = ((p.kind, p.name) for s in self.stages for p in parts_of(s.breakdown))
        total = sum(ns for ns, key in zip(found, keys, strict=True) if key == (kind, name))
        return total / len(self.stages)

    @property
    def step_ns(self) -> float:
        """Mean length of the step."""
        return sum(s.breakdown.step_ns for s in self.stages) / len(self.stages)

    @property
    def peak_bytes(self) -> int | None:
        """The highest peak of the stages; a mean of memory would say nothing."""
        return max((s.peak_bytes for s in self.stages if s.peak_bytes is not None), default=None)

    @property
    def fullest(self) -> StageResult:
        """The stage whose GPU is fullest."""
        return max(self.stages, key=lambda s: (s.reserved_bytes or 0) + s.outside_bytes)


def _event_table(result: RunResult) -> RenderableType:
    table = Table(**_TABLE)
    table.add_column("", no_wrap=True)
    table.add_column("adds", justify="right", no_wrap=True)
    table.add_column("of training", justify="right", no_wrap=True)
    table.add_column("what", overflow="fold")
    for event in result.notable_events:
        share = percent(event.share) if event.every else "–"
        table.add_row(event_name(event), duration(event.extra_ns), share, event_source(event))
    return Group(Text("What happens only in some steps", style="bold"), table)


def _columns(stages: Sequence[StageResult]) -> list[_Column]:
    """Return a column per stage, or the first, the busiest, the mean of the rest, and the last."""
    if len(stages) <= MOST_COLUMNS:
        return [_Column(head=s.name, stages=(s,)) for s in stages]
    busiest = max(stages[1:-1], key=lambda s: s.breakdown.total_compute_ns)
    others = tuple(s for s in stages[1:-1] if s is not busiest)
    return [
        _Column(head=stages[0].name, stages=(stages[0],)),
        _Column(head=f"{busiest.name}\nbusiest", stages=(busiest,)),
        _Column(head=f"{len(others)} others\nmean", stages=others),
        _Column(head=stages[-1].name, stages=(stages[-1],)),
    ]


def _stage_table(result: RunResult) -> RenderableType:
    columns = _columns(result.stages)
    scale = Scale.of(max((c.step_ns for c in columns), default=0))
    table = Table(**_TABLE)
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=20)
    for column in columns:
        table.add_column(Text(column.head), justify="right", no_wrap=True)
    for kind, name in part_names(result):
        label = f"exposed {name}" if kind == "communication" else name
        cells = (_cell(c.part_ns(kind, name), c.step_ns, scale) for c in columns)
        table.add_row(Text(label, style=STYLES[kind]), *cells)
    table.add_section()
    steps = (Text(f"{scale.figure(c.step_ns)}      ", style="bold") for c in columns)
    table.add_row(Text("step", style="bold"), *steps)
    peaks = ("not tracked" if c.peak_bytes is None else size(c.peak_bytes) for c in columns)
    table.add_row("peak memory", *peaks)
    if any(c.fullest.reserved_bytes for c in columns):
        table.add_row("reserved", *(size(c.fullest.reserved_bytes or 0) for c in columns))
    if any(c.fullest.outside for c in columns):
        table.add_row("outside torch", *(size(c.fullest.outside_bytes) for c in columns))
    which = "Where the last step that ended went" if result.hung else "Where a step goes"
    title = f"{which}, in {scale.unit} and % of the step"
    return _titled(title, table, _stage_notes(result, columns))


def _stage_notes(result: RunResult, columns: Sequence[_Column]) -> str:
    return "\n".join(filter(None, (_collapsed(columns), outside_sentence(result))))


def _collapsed(columns: Sequence[_Column]) -> str:
    if all(len(c.stages) == 1 for c in columns):
        return ""
    return "Others: means, but the highest peak memory. The HTML report has every stage."


def _titled(title: str, table: Table, note: str = "") -> RenderableType:
    # A table's own title would wrap where the table is narrow.
    below = [Text(note, style="dim")] if note else []
    return Group(Text(title, style="bold"), table, *below)


def _cell(ns: float, step_ns: float, scale: Scale) -> Text:
    if ns == 0 or step_ns == 0:
        return Text("–      ", style="dim")
    share = ns / step_ns
    shown = f"{share:.0%}"[:-1] if share >= 0.005 else "<1"
    return Text(f"{scale.figure(ns)} {shown:>3} %")


def _live_table(result: RunResult) -> RenderableType:
    table = Table(**_TABLE)
    for head in ("rank", "predicted", "observed", "off by", "lag", "peak", "uncovered"):
        table.add_column(head, justify="right", no_wrap=True)
    for live in result.live:
        off = difference(live)
        table.add_row(
            str(live.rank),
            duration(live.predicted_step_ns),
            duration(live.median_step_ns) if live.step_ns else "–",
            Text("–" if off is None else signed_percent(off), style="bold"),
            duration(live.lag_ns),
            live_peak(live),
            f"{live.uncovered:,}",
        )
    note = "Medians of the observed steps. Lag is the emulation's own, and not in them."
    return _titled("Live ranks: what was observed beside what was predicted", table, note)


def _kernel_table(result: RunResult, width: int) -> RenderableType:
    table = Table(**_TABLE)
    # The other columns leave 31 of 80 characters.
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=max(31, min(width - 49, 64)))
    for head in ("share", "calls", "time", "source", "error"):
        table.add_column(head, justify="left" if head == "source" else "right", no_wrap=True)
    for row in kind_rows(result)[:MOST_KINDS]:
        table.add_row(*row)
    left = len(result.kernels) - MOST_KINDS
    table.add_section()
    for row in call_rows(result)[:MOST_CALLS]:
        table.add_row(*row)
    more = f"{counted(left, 'more kind')} and " if left > 0 else ""
    note = f"Shares are of the device's time. The HTML report has {more}more calls."
    title = "Kernels in a step of the captured ranks: by kind, and the longest calls (each)"
    return _titled(title, table, note)


def _notes(result: RunResult, folder: RunFolder | None) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    grid.add_row("Rank classes", Text(" ".join(class_sentences(result))))
    grid.add_row("Durations", _sources(result))
    if result.kernels and result.watched_steps:
        grid.add_row("Steps", Text(watched_sentence(result)))
    if variation := variability_sentence(result):
        grid.add_row("Variation", Text(variation))
    if result.kernels:
        grid.add_row("Kernels", Text(coverage_sentence(result)))
    if result.stand_ins:
        grid.add_row("Stand-ins", Text("\n".join(stand_in_sentences(result))))
    if experts := router_sentences(result):
        grid.add_row("Experts", Text("\n".join(experts)))
    if result.values:
        grid.add_row("Values", Text("\n".join(value_sentences(result))))
    if result.payloads:
        grid.add_row("Payloads", Text("\n".join(payload_sentences(result))))
    if rows := transfer_rows(result):
        grid.add_row("Transfers", Text("\n".join(f"{who} {what}" for who, what in rows)))
    for n, warning in enumerate(warnings_of(result)):
        label = Text("Warnings" if n == 0 else "", style="bold yellow")
        grid.add_row(label, Text(warning, style="yellow"))
    grid.add_row("This run", Text(_cost(result)))
    if folder is not None:
        grid.add_row("Files", _files(folder))
    return grid


def _sources(result: RunResult) -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    for source in result.sources:
        line = Text(source.source).append(f"; {source.error}", style="dim")
        grid.add_row(percent(source.share), line)
    return grid


def _cost(result: RunResult) -> str:
    total = seconds(sum(result.wall_s.values()))
    memory = f" and at most {size(result.peak_rss_bytes)}" if result.peak_rss_bytes else ""
    stages = [f"{name} {seconds(wall)}" for name, wall in result.wall_s.items()]
    return "\n".join([f"{total}{memory}", *_packed(stages)])


def _packed(items: Iterable[str], width: int = 62) -> list[str]:
    """Join ``items`` into lines without a line break inside an item."""
    line = ", ".join(item.replace(" ", "\0") for item in items)
    return [wrapped.replace("\0", " ") for wrapped in textwrap.wrap(line, width)]


def _files(folder: RunFolder) -> Text:
    return Text("\n".join(_existing(folder)) or "none", overflow="fold")


def _existing(folder: RunFolder) -> Iterable[str]:
    paths = (folder.report, folder.results, folder.trace, folder.timeline)
    return (str(p) for p in paths if p.exists())


_TABLE: dict[str, Any] = {
    "box": SIMPLE_HEAD,
    "show_edge": False,
    "header_style": "dim",
    "padding": (0, 1),
    "pad_edge": False,
}
