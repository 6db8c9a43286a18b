"""Explored layouts in ``report.html``: p50 and p95 of each, what each needs, and what cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prismscale.report.html import fragment
from prismscale.report.plots import OBSERVED, figure, markup, plain
from prismscale.report.units import size

_TABLE = """
<table><thead><tr>{% for h in head %}<th>{{ h }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table>
"""
HEAD = ("layout", "p50", "p95", "peak memory", "")


def layouts_section(explored: Mapping[str, Any]) -> str:
    """The plot, and the table beside it."""
    layouts = explored["layouts"]
    rows = [
        (
            found["layout"],
            _ms(found["p50_ns"]),
            _ms(found["p95_ns"]),
            "" if found["peak_bytes"] is None else size(found["peak_bytes"]),
            found["why_not"],
        )
        for found in layouts
    ]
    possible = [found for found in layouts if found["p95_ns"] is not None]
    table = fragment(_TABLE, head=HEAD, rows=rows)
    return (_plot(possible) if possible else "") + table


def _plot(layouts: Sequence[Mapping[str, Any]]) -> str:
    """A bar from p50 to p95 for each layout, the fastest on top."""
    drawn = figure(height=90 + 26 * len(layouts), xaxis_title="step, ms")
    names = [plain(found["layout"]) for found in layouts]
    p50, p95 = ([found[key] / 1e6 for found in layouts] for key in ("p50_ns", "p95_ns"))
    drawn.add_scatter(
        x=[at for pair in zip(p50, p95, strict=True) for at in (*pair, None)],
        y=[name for name in names for _ in range(3)],
        mode="lines",
        line={"color": OBSERVED[1], "width": 4},
        showlegend=False,
        hoverinfo="skip",
    )
    for values, name, colour in ((p50, "p50", OBSERVED[1]), (p95, "p95", OBSERVED[0])):
        drawn.add_scatter(
            x=values, y=names, mode="markers", name=name, marker={"color": colour, "size": 10}
        )
    drawn.update_yaxes(autorange="reversed")
    return markup(drawn, "forecast-layouts")


def _ms(ns: float | None) -> str:
    return "" if ns is None else f"{ns / 1e6:,.2f} ms"
