"""A run beside what it would be, as rows of text: for the terminal and the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Column, Table

from prismscale.analysis.attribution import Breakdown
from prismscale.forecast.hoped_run import HopedRun, HopedStage, Side
from prismscale.report.remarks import PHASES, parts_of
from prismscale.report.units import Scale, duration, percent, signed_percent

EFFECT_HEADS = ("what if", "touches", "of the step", "alone")
FIGURE_HEADS = ("", "as it is", "what if", "")
PART_HEADS = ("", "as it is", "what if", "difference")
MOST_STAGES = 4
_ARROW = "→"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRows:
    """Where the step of one stage goes."""

    name: str
    unit: str
    """Of all figures."""
    rows: tuple[tuple[str, ...], ...]
    """By :data:`PART_HEADS`; the last is the whole step."""


def effect_rows(found: HopedRun) -> list[tuple[str, ...]]:
    """What each what-if touches, and what it does alone, by :data:`EFFECT_HEADS`."""
    base = found.before.step_ns
    return [
        (effect.text, effect.touches, percent(effect.share), _change(base, alone))
        for effect, alone in zip(found.effects, found.alone_ns, strict=True)
    ]


def figure_rows(found: HopedRun) -> list[tuple[str, ...]]:
    """Figures of the job, by :data:`FIGURE_HEADS`."""
    pairs = zip(_figures(found.before), _figures(found.after), strict=True)
    return [
        (name, duration(was), duration(then), _change(was, then))
        for (name, was), (_, then) in pairs
    ]


def stage_rows(found: HopedRun) -> list[StageRows]:
    """Where the step of each stage goes, on both sides."""
    return [
        _stage(was, then) for was, then in zip(found.before.stages, found.after.stages, strict=True)
    ]


def print_hoped(console: Console, found: HopedRun) -> None:
    """What is touched, the figures of the job, and where the step of its stages goes."""
    _print(console, EFFECT_HEADS, effect_rows(found), left=2)
    _print(console, FIGURE_HEADS, figure_rows(found), left=1)
    stages = stage_rows(found)
    for stage in stages if len(stages) <= MOST_STAGES else (stages[0], stages[-1]):
        _print(console, (f"{stage.name}, {stage.unit}", *PART_HEADS[1:]), stage.rows, left=1)
    if len(stages) > MOST_STAGES:
        console.print(f"{len(stages) - 2} stages between these are in results.json and report.html")


def _print(
    console: Console, heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int
) -> None:
    columns = (
        Column(head, justify="left" if n < left else "right", no_wrap=n != 1 or left < 2)
        for n, head in enumerate(heads)
    )
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _figures(side: Side) -> list[tuple[str, float]]:
    return [
        ("step, without variation", side.step_ns),
        ("exposed communication", side.exposed_ns),
        *((f"step, p{100 * q:g}", ns) for q, ns in side.quantile_ns.items()),
    ]


def _stage(was: HopedStage, then: HopedStage) -> StageRows:
    both = was.breakdown, then.breakdown
    scale = Scale.of(max(b.step_ns for b in both))
    before, after = (_parts(b) for b in both)
    names = [name for name in {**before, **after} if before.get(name) or after.get(name)]
    names.sort(key=lambda name: not name.startswith(PHASES))
    figures = [(name, before.get(name, 0.0), after.get(name, 0.0)) for name in names]
    figures.append(("step", was.breakdown.step_ns, then.breakdown.step_ns))
    rows = (
        (name, scale.figure(a), scale.figure(b), _signed(scale.figure(b - a)))
        for name, a, b in figures
    )
    return StageRows(name=was.name, unit=scale.unit, rows=tuple(rows))


def _parts(breakdown: Breakdown) -> dict[str, float]:
    """By name, in the order of the report."""
    return {
        f"exposed {p.name}" if p.kind == "communication" else p.name: p.ns
        for p in parts_of(breakdown)
    }


def _signed(figure: str) -> str:
    """With a sign, unless it rounds to nothing."""
    if not figure.strip("-0.,"):
        return figure.lstrip("-")
    return figure if figure.startswith("-") else f"+{figure}"


def _change(was: float, then: float) -> str:
    return signed_percent(then / was - 1) if was else "–"
