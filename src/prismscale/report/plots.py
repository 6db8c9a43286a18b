"""Plots in one style: each colour has one meaning, and the markup follows the page's theme."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go
import plotly.io

PHASE_COLOURS = {"forward": "#5b9bd5", "backward": "#2a6099", "optimizer": "#8e6bb0"}
OTHER_PHASES = ("#5aa7a7", "#3f7f7f", "#7488a8", "#55688a")
GROUP_COLOURS = ("#e69138", "#cc4c3b", "#d4b02c", "#3f9c6e", "#b8578f", "#7d8b34", "#a0704a")
WAITING_COLOURS = {"bubble": "#b3b9c2", "skew": "#cfa9a0"}
OBSERVED = ("#cc4c3b", "#2a6099", "#3f9c6e", "#8e6bb0", "#e69138", "#5aa7a7")
PREDICTED = "#8a93a0"

CONFIG = {"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["lasso2d"]}


class Palette:
    """One colour for each part of a step, the same in every plot of a page."""

    def __init__(self, names: Iterable[tuple[str, str]]) -> None:
        """``names``: pairs ``(kind, name)``; see :func:`~prismscale.report.remarks.part_names`."""
        self._colours: dict[tuple[str, str], str] = {}
        for kind, name in names:
            self.of(kind, name)

    def of(self, kind: str, name: str) -> str:
        """Return the colour of a part; a new part gets the next colour of its kind."""
        key = (kind, name)
        if key not in self._colours:
            self._colours[key] = self._next(kind, name)
        return self._colours[key]

    @property
    def colours(self) -> list[str]:
        """All colours, in the order of their parts."""
        return list(self._colours.values())

    def _next(self, kind: str, name: str) -> str:
        if kind == "waiting":
            return WAITING_COLOURS.get(name, WAITING_COLOURS["bubble"])
        if kind == "computation" and name in PHASE_COLOURS:
            return PHASE_COLOURS[name]
        choice = OTHER_PHASES if kind == "computation" else GROUP_COLOURS
        used = sum(k == kind and n not in PHASE_COLOURS for k, n in self._colours)
        return choice[used % len(choice)]


def plain(text: str) -> str:
    """Escape ``text``, because plotly interprets markup in labels."""
    return html.escape(text)


def figure(*, height: int, **layout: Any) -> go.Figure:
    """Return an empty figure. The page's style sheet sets the colours of its text and lines."""
    drawn = go.Figure()
    drawn.update_layout(
        template=None,
        height=height,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "inherit", "size": 13},
        hoverlabel={"bgcolor": "#1d232b", "font": {"color": "#f2f4f7", "size": 13}},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    )
    drawn.update_layout(**layout)
    axis = {
        "automargin": True,
        "gridcolor": "#d9dde3",
        "zeroline": False,
        "title_font_size": 13,
        # Invisible ticks keep the labels off the bars.
        "ticks": "outside",
        "ticklen": 6,
        "tickcolor": "rgba(0,0,0,0)",
    }
    drawn.update_xaxes(**axis)
    drawn.update_yaxes(**axis)
    return drawn


def markup(drawn: go.Figure, name: str) -> str:
    """Return ``drawn`` as HTML for a page with plotly.js; ``name`` must be unique on the page."""
    block = plotly.io.to_html(
        drawn, full_html=False, include_plotlyjs=False, div_id=f"plot-{name}", config=CONFIG
    )
    return f'<div class="plot">{block}</div>'
