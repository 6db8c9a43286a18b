"""Plots of docs/prism.md: a study of one job at several sizes as SVG, for light and dark pages."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs_picture import DARK, FONT, LIGHT, Theme

from prismscale.runfolder import RunFolder

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 300, 64, 150, 56, 44
BAR, NAMES = 24, 190
Study = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Where data lie on the picture; ``x`` by place, because sizes grow by factors."""

    places: int
    low: float
    high: float

    def x(self, place: float) -> float:
        """Of one of the places."""
        return LEFT + (WIDTH - LEFT - RIGHT) * (place + 0.5) / self.places

    def y(self, value: float) -> float:
        """Of a value."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.low) / self.span

    @property
    def span(self) -> float:
        """Of the values."""
        return max(self.high - self.low, 1e-9)


TEXTS = {
    "growth": "p5, p50 and p95 of the step over the step without variation, by number of ranks",
    "steady": "How much the p95 falls with each class of kernels or communications made steady",
    "hot": "The step with one slow node at each pipeline stage",
}
"""What each picture shows, for those who do not see it."""


def pictures() -> str:
    """The pictures as a page shows them."""
    return "\n".join(
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" '
        f'srcset="images/prism-{name}-dark.svg">\n'
        f'  <img alt="{text}" src="images/prism-{name}-light.svg">\n</picture>'
        for name, text in TEXTS.items()
    )


def draw_studies(runs: Sequence[Path], out: Path) -> None:
    """``prism-growth``, ``prism-steady`` and ``prism-hot``, each ``-light.svg`` and
    ``-dark.svg``; the last two of the largest job."""
    studies = sorted(map(study_of, runs), key=lambda s: int(s["world_size"]))
    drawings: dict[str, Callable[[Theme], str]] = {
        "growth": lambda theme: growth(studies, theme),
        "steady": lambda theme: steady(studies[-1], theme),
        "hot": lambda theme: hot(studies[-1], theme),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in drawings.items():
        for side, theme in (("light", LIGHT), ("dark", DARK)):
            (out / f"prism-{name}-{side}.svg").write_text(draw(theme))


def study_of(run: Path) -> Study:
    """What ``prismscale study prism`` left in a run folder."""
    found: Study = json.loads(RunFolder(root=run).results.read_text())["forecast"]["prism"]
    return found


def growth(studies: Sequence[Study], theme: Theme) -> str:
    """p5, p50 and p95 over the step without variation, by size."""
    colours = {"0.05": theme.forward, "0.5": theme.backward, "0.95": theme.communication}
    over = {
        q: [
            100 * (s["quantiles_ns"][q]["value"] / s["step_without_variation_ns"] - 1)
            for s in studies
        ]
        for q in colours
    }
    every = [0.0, *(value for values in over.values() for value in values)]
    axes = Axes(places=len(studies), low=min(every), high=max(every))
    parts = [*_grid(axes, theme), *_places(axes, [f"{s['world_size']:,}" for s in studies], theme)]
    names = {"0.05": "p5", "0.5": "p50", "0.95": "p95"}
    for q, colour in colours.items():
        parts += _line(axes, over[q], colour, f"{names[q]} {over[q][-1]:+.2f} %")
    return _page("Step over the step without variation, by number of ranks", parts, HEIGHT, theme)


def steady(study: Study, theme: Theme) -> str:
    """What each class does to the p95."""
    made = sorted(study["classes"], key=lambda c: -c["p95_gain"])
    most = max((c["p95_gain"] for c in made), default=0) or 1
    parts = []
    for n, own in enumerate(made):
        y, gain = TOP + BAR * n, own["p95_gain"]
        width = max(gain / most * (WIDTH - NAMES - 100), 1)
        kernels = own["name"].endswith("kernels")
        parts.append(_text(NAMES - 8, y + 13, own["name"], theme.ink, anchor="end"))
        parts.append(
            f'<rect x="{NAMES}" y="{y}" width="{width:.1f}" height="{BAR - 8}" rx="2" '
            f'fill="{theme.forward if kernels else theme.communication}"/>'
        )
        parts.append(_text(NAMES + width + 8, y + 13, f"{gain:z.2%}", theme.soft))
    title = f"p95 of {study['world_size']:,} ranks falls, with one class made steady"
    return _page(title, parts, TOP + BAR * len(made) + 16, theme)


def hot(study: Study, theme: Theme) -> str:
    """What one slow node costs at each stage."""
    stages = sorted({h["stage"] for h in study["hot"]})
    factors = sorted({h["factor"] for h in study["hot"]})
    cost = {(h["factor"], h["stage"]): 100 * h["slowdown"] for h in study["hot"]}
    axes = Axes(places=len(stages), low=0.0, high=max(cost.values()))
    parts = [*_grid(axes, theme), *_places(axes, [f"stage {s}" for s in stages], theme)]
    shades = (theme.forward, theme.backward, theme.optimizer, theme.communication, theme.soft)
    for n, factor in enumerate(factors):
        values = [cost[factor, s] for s in stages]
        parts += _line(axes, values, shades[n % len(shades)], f"× {factor:g}")
    title = f"One slow node of {study['world_size']:,} ranks: step without other variation"
    return _page(title, parts, HEIGHT, theme)


def _line(axes: Axes, values: Sequence[float], colour: str, name: str) -> Iterator[str]:
    points = [(axes.x(i), axes.y(value)) for i, value in enumerate(values)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y in points:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
    x, y = points[-1]
    yield _text(WIDTH - RIGHT + 8, y + 4, name, colour)


def _grid(axes: Axes, theme: Theme) -> Iterator[str]:
    """Four to eight lines, at round values."""
    rough = axes.span / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    every = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
    first = int(axes.low / every) - 1
    for n in range(first, first + 12):
        value = n * every
        if axes.low - 1e-9 <= value <= axes.high + 1e-9:
            y = axes.y(value)
            yield (
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="{theme.line}"/>'
            )
            yield _text(LEFT - 8, y + 4, f"{value:g} %", theme.soft, anchor="end")


def _places(axes: Axes, names: Sequence[str], theme: Theme) -> Iterator[str]:
    for i, name in enumerate(names):
        yield _text(axes.x(i), HEIGHT - 16, name, theme.soft, anchor="middle")


def _text(x: float, y: float, text: str, colour: str, *, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}" '
        f'fill="{colour}">{html.escape(text)}</text>'
    )


def _page(title: str, parts: Sequence[str], height: int, theme: Theme) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="{FONT}" font-size="13" role="img">',
        f"<title>{html.escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{theme.page}"/>',
        f'<text x="24" y="32" font-size="15" font-weight="600" fill="{theme.ink}">'
        f"{html.escape(title)}</text>",
    )
    return "\n".join([*head, *parts, "</svg>", ""])
