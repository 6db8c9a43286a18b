"""The HTML page around a report: one file that needs no network.

plotly.js is inlined once, and only if a section has a plot. A content security policy forbids the
page to load anything, so a report can be opened, mailed and archived without concern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from prismscale.analysis.answers import host_of
from prismscale.analysis.result import RunResult
from prismscale.report.remarks import (
    difference,
    highest_peak_bytes,
    job_shares,
    warnings_of,
)
from prismscale.report.units import counted, duration, seconds, signed_percent, size, span

PLOT_CLASS = "plotly-graph-div"
"""CSS class in the markup of every plotly figure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One part of a page, with an entry in its navigation."""

    title: str
    html: str
    """Trusted markup: all text from a user must already be escaped in it."""
    order: float
    """Sections are shown in ascending order; those of a run use 10, 20, …"""

    @property
    def anchor(self) -> str:
        """The section's id on the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One headline figure."""

    label: str
    value: str
    note: str = ""


def render(result: RunResult, sections: Iterable[Section]) -> str:
    """Render the report of one run: headline figures of ``result``, then ``sections``."""
    where = f"{counted(result.world_size, 'rank')} on {result.cluster}"
    return render_page(
        where,
        sections,
        subtitle=result.command,
        cards=_cards(result),
        shares=_shares(result),
        warnings=warnings_of(result),
    )


def render_page(
    title: str,
    sections: Iterable[Section],
    *,
    subtitle: str = "",
    cards: Sequence[Card] = (),
    shares: Sequence[tuple[str, str, float]] = (),
    warnings: Sequence[str] = (),
) -> str:
    """Render a page of any sections.

    Args:
        title: title of the page and of the browser's tab. It is escaped here, as is all text except
            that of sections.
        sections: sections, shown in the order of :attr:`Section.order`.
        subtitle: one line under the title.
        cards: headline figures.
        shares: ``(css class, name, fraction)`` of each part of the bar under the cards.
        warnings: what a reader must know before believing the figures.
    """
    ordered = sorted(sections, key=lambda s: s.order)
    plots = any(PLOT_CLASS in section.html for section in ordered)
    return template("template.html.j2").render(
        title=title,
        subtitle=subtitle,
        cards=cards,
        shares=shares,
        warnings=warnings,
        sections=[(s.anchor, s.title, Markup(s.html)) for s in ordered],
        plotly_js=Markup(get_plotlyjs()) if plots else "",
    )


def fragment(source: str, **values: Any) -> str:
    """Render a small template given as text; every value is escaped."""
    return _environment().from_string(source).render(**values)


def template(name: str) -> Any:
    """Return a template of this package."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("prismscale.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _kind_of_step(result: RunResult) -> str:
    if result.hung:
        return "the job hangs"
    if result.spread:
        steady = duration(result.step_ns)
        return f"median of {result.spread.draws:,} draws; {steady} without variation"
    if result.varies:
        return f"median of simulated steps of {span(*result.step_spread_ns)}"
    return "one steady step of the whole job"


def _cards(result: RunResult) -> list[Card]:
    peak = highest_peak_bytes(result)
    observed = [d for d in map(difference, result.live) if d is not None]
    spent = sum(result.wall_s.values())
    cards = [
        Card(
            label="Predicted step time",
            value=duration(result.median_ns),
            note=_kind_of_step(result),
        )
    ]
    if observed:
        worst = max(observed, key=abs)
        ranks = counted(len(observed), "live rank")
        cards.append(
            Card(
                label="Observed vs. predicted",
                value=signed_percent(worst),
                note=f"median step, the farthest of {ranks}",
            )
        )
    if peak is not None:
        cards.append(Card(label="Peak memory", value=size(peak), note="of the fullest stage"))
    cards.append(
        Card(
            label="Cost of this run",
            value=seconds(spent),
            note=f"{size(result.peak_rss_bytes)} of memory" if result.peak_rss_bytes else "",
        )
    )
    return cards


_SHARES = (
    ("computation", "computation"),
    ("host", "waiting for launches"),
    ("communication", "exposed communication"),
    ("bubble", "pipeline bubble"),
    ("skew", "skew"),
)


def _shares(result: RunResult) -> list[tuple[str, str, float]]:
    found = job_shares(result)
    found["host"] = host_of(result)
    found["computation"] -= found["host"]
    return [(key, name, found[key]) for key, name in _SHARES if found[key] > 0]
