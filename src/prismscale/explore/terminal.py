"""A sweep as text on the terminal: one row per point, in 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from prismscale.explore.outcome import Outcome, Status
from prismscale.explore.ranking import Explored, Ranking
from prismscale.explore.sweep_folder import SweepFolder
from prismscale.report.units import Scale, counted, duration, percent, size

MOST_ROWS = 40
"""Most rows on the terminal; the files have all."""
MOST_REASONS = 12
LONGEST_NAME, LONGEST_VALUE = 8, 15
GIB = 2**30
FIGURES = ("tok/s", "MFU", "GiB", "comm", "bubble")


def print_ranking(console: Console, ranking: Ranking, folder: SweepFolder) -> None:
    """Print the table, a key to its columns, why points have no figures, and the best point."""
    names = list(ranking.rows[0].point.values)
    short = short_names(names)
    front = {row.point.digest for row in ranking.front}
    longest = max((row.outcome.p95_ns or 0 for row in ranking.rows), default=0)
    scale = Scale.of(longest)
    times = (f"p50, {scale.unit}", f"p95, {scale.unit}")
    table = Table(
        *(Column(s, max_width=LONGEST_VALUE, overflow="fold") for s in short),
        *(Column(figure, justify="right", no_wrap=True) for figure in (*times, *FIGURES)),
        Column("", no_wrap=True),
        box=None,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for row in ranking.rows[:MOST_ROWS]:
        cells = (value or "–" for value in row.point.values.values())
        mark = "*" if row.point.digest in front else ""
        table.add_row(*cells, *_figures(row.outcome, scale), mark)
    console.print(table)
    left = len(ranking.rows) - MOST_ROWS
    if left > 0:
        console.print(f"… and {left:,} more in {folder.table}")
    renamed = [f"{s}: {n}" for s, n in zip(short, names, strict=True) if s != n]
    if renamed:
        console.print("; ".join(renamed), markup=False)
    console.print(
        "Shares and MFU are of the whole job's step. GiB: the fullest GPU. "
        "*: no other point is both faster and smaller."
    )
    _print_reasons(console, ranking.rows)
    _print_chosen(console, ranking)
    for path in (folder.report, folder.table, folder.results):
        console.print(f"  {path}", soft_wrap=True, markup=False)


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten names for narrow columns.

    A long name becomes the first letters of its words. Where short names are equal, each gets a
    number."""
    short = [
        name if len(name) <= LONGEST_NAME else "".join(word[0] for word in name.split("_") if word)
        for name in names
    ]
    return [
        s if short.count(s) == 1 else f"{s}{short[:i].count(s) + 1}" for i, s in enumerate(short)
    ]


def _figures(outcome: Outcome, scale: Scale) -> list[str | Text]:
    if outcome.status is not Status.DONE:
        return [Text(outcome.status.value, style="red"), *[""] * (len(FIGURES) + 1)]
    held = Text("–" if outcome.held_bytes is None else f"{outcome.held_bytes / GIB:.1f}")
    if outcome.fits is False:
        held.stylize("red")
    return [
        scale.figure(outcome.p50_ns or 0),
        scale.figure(outcome.p95_ns or 0),
        "–" if outcome.tokens_per_s is None else _count(outcome.tokens_per_s),
        "–" if outcome.mfu is None else f"{100 * outcome.mfu:.1f}%",
        held,
        _share(outcome.exposed),
        _share(outcome.bubble),
    ]


def _count(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.4g}{unit}"
    return f"{value:.4g}"


def _share(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.0f}%"


def _print_reasons(console: Console, rows: Sequence[Explored]) -> None:
    """Print why points have no figures, points with the same reason together."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        outcome = row.outcome
        if outcome.status is not Status.DONE:
            key = (outcome.status.value, outcome.reason)
            by_reason.setdefault(key, []).append(row.point.label)
    for (status, reason), labels in list(by_reason.items())[:MOST_REASONS]:
        which = labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
        console.print(f"- {which}: {status}: {reason}", markup=False, soft_wrap=True)
    left = len(by_reason) - MOST_REASONS
    if left > 0:
        console.print(f"- … {counted(left, 'further reason')} in the files")


def _print_chosen(console: Console, ranking: Ranking) -> None:
    chosen = ranking.chosen
    if chosen is None:
        console.print("No point fits and has figures.")
        return
    outcome = chosen.outcome
    figures = [f"step {duration(outcome.p50_ns or 0)} (p50)"]
    if outcome.tokens_per_s is not None:
        said = "given" if outcome.tokens_given else "found"
        figures.append(f"{_count(outcome.tokens_per_s)} tokens/s ({said})")
    if outcome.mfu is not None:
        figures.append(f"MFU {percent(outcome.mfu)}")
    if outcome.held_bytes is not None:
        figures.append(size(outcome.held_bytes))
    by = "tokens a second" if ranking.by_tokens else "step"
    console.print(f"Best by {by}: {chosen.point.label}", markup=False, highlight=False)
    console.print("  " + ", ".join(figures))
