"""A comparison as a page: bars of a step's parts side by side, and the tables."""

from __future__ import annotations

from collections.abc import Sequence

from prismscale.analysis.comparison import ComparedPart, Measure
from prismscale.analysis.result import RunResult
from prismscale.report.html import Card, Section, fragment, render_page
from prismscale.report.plots import GROUP_COLOURS, OTHER_PHASES, figure, markup, plain
from prismscale.report.units import duration, size

_TABLE = """
{% if note %}<p>{{ note }}</p>{% endif %}
<div class="scroll"><table class="searched"><thead><tr>
{% for h in head %}<th{% if loop.index0 %} class="n"{% endif %}>{{ h }}</th>{% endfor %}
</tr></thead><tbody>
{% for row in rows %}<tr>{% for cell in row %}
<td{% if loop.index0 %} class="n"{% endif %}>{{ cell }}</td>
{% endfor %}</tr>{% endfor %}
</tbody></table></div>
"""
_WAITING = {"bubble": "#b3b9c2", "skew": "#cfa9a0"}


def comparison_page(
    names: Sequence[str], results: Sequence[RunResult], parts: Sequence[ComparedPart]
) -> str:
    """The page as HTML."""
    sections = [
        Section(title=part.title, html=_section(names, part), order=10.0 * n)
        for n, part in enumerate(parts, start=1)
    ]
    cards = [
        Card(label=name, value=duration(result.median_ns), note=f"{result.cluster}")
        for name, result in zip(names, results, strict=True)
    ]
    return render_page("Compared", sections, subtitle=" · ".join(names), cards=cards)


def _section(names: Sequence[str], part: ComparedPart) -> str:
    head = ["", *names, *(f"{name} beyond {names[0]}" for name in names[1:])]
    rows = [
        [f.name, *(_cell(f.measure, v) for v in (*f.values, *f.differences))] for f in part.figures
    ]
    table = fragment(_TABLE, head=head, rows=rows, note=part.note)
    return (_bars(names, part) if part.adds_up and len(part.figures) > 1 else "") + table


def _cell(measure: Measure, value: float | None) -> str:
    if value is None:
        return "–"
    if measure is Measure.TIME:
        return duration(value)
    return size(value) if measure is Measure.BYTES else f"{value:,.0f}"


def _bars(names: Sequence[str], part: ComparedPart) -> str:
    """One bar a run, of the part's figures."""
    drawn = figure(height=90 + 44 * len(names), barmode="stack", xaxis_title="ms")
    colours = (*OTHER_PHASES, *GROUP_COLOURS)
    for n, compared in enumerate(part.figures):
        drawn.add_bar(
            y=[plain(name) for name in names],
            x=[(value or 0) / 1e6 for value in compared.values],
            name=plain(compared.name),
            orientation="h",
            marker={"color": _WAITING.get(compared.name, colours[n % len(colours)])},
        )
    drawn.update_yaxes(autorange="reversed")
    return markup(drawn, f"compare-{part.title.lower().replace(' ', '-')}")
