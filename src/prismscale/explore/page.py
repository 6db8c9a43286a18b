"""A sweep as an HTML page: time against memory, and the table of all points."""

from __future__ import annotations

from collections.abc import Sequence

from prismscale.explore.outcome import Outcome, Status
from prismscale.explore.ranking import Explored, Ranking
from prismscale.explore.sweep_folder import SweepFolder
from prismscale.files import write_text
from prismscale.report.html import Card, Section, fragment, render_page
from prismscale.report.plots import OBSERVED, PREDICTED, figure, markup, plain
from prismscale.report.units import counted, duration, percent, size

GIB = 2**30
_TABLE = """
<table><thead><tr>{% for h in head %}<th>{{ h }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}
<td>{% if row_links[loop.index0] %}<a href="{{ row_links[loop.index0] }}">report</a>{% endif %}</td>
</tr>{% endfor %}
</tbody></table>
"""
_NOTE = """<p>{{ note }}</p>"""
HEAD = (
    *("without variation", "p50", "p95", "tokens/s", "MFU", "reserved", "fullest GPU", "fits"),
    *("computation", "exposed communication", "bubble", "skew", ""),
)


def write_page(ranking: Ranking, folder: SweepFolder, command: str) -> None:
    """Write ``report.html``. Raises :class:`StorageError`."""
    sections = [Section(title="All points", html=_table(ranking, folder), order=20)]
    measured = [row for row in ranking.rows if row.outcome.held_bytes is not None]
    if measured:
        sections.append(Section(title="Time and memory", html=_front(ranking, measured), order=10))
    page = render_page("Explored", sections, subtitle=command, cards=_cards(ranking))
    write_text(folder.report, page)


def _cards(ranking: Ranking) -> list[Card]:
    done = sum(row.outcome.status is Status.DONE for row in ranking.rows)
    cards = [
        Card(
            label="Points",
            value=f"{len(ranking.rows):,}",
            note=f"{done:,} with figures",
        )
    ]
    chosen = ranking.chosen
    if chosen is None:
        return cards
    by = "tokens a second" if ranking.by_tokens else "step"
    cards.append(Card(label=f"Best by {by}", value=chosen.point.label))
    cards.append(Card(label="Its step (p50)", value=duration(chosen.outcome.p50_ns or 0)))
    if chosen.outcome.held_bytes is not None:
        cards.append(Card(label="Its fullest GPU", value=size(chosen.outcome.held_bytes)))
    return cards


def _front(ranking: Ranking, measured: Sequence[Explored]) -> str:
    """Return the plot of all points with known memory, with a line through the Pareto front."""
    unit = "tokens a second" if ranking.by_tokens else "step (p50), s"
    drawn = figure(height=420, xaxis_title=unit, yaxis_title="fullest GPU, GiB")
    front = ranking.front
    on_front = {row.point.digest for row in front}
    drawn.add_scatter(
        x=[_speed(row, ranking) for row in front],
        y=[_gib(row) for row in front],
        mode="lines",
        line={"color": OBSERVED[1], "width": 2, "shape": "hv"},
        showlegend=False,
        hoverinfo="skip",
    )
    fit = [row for row in measured if row.outcome.fits is not False]
    kinds = (
        ("none is faster and smaller", OBSERVED[1], front),
        ("others", PREDICTED, [row for row in fit if row.point.digest not in on_front]),
        ("does not fit", OBSERVED[0], [row for row in measured if row.outcome.fits is False]),
    )
    for name, colour, rows in kinds:
        drawn.add_scatter(
            x=[_speed(row, ranking) for row in rows],
            y=[_gib(row) for row in rows],
            text=[plain(row.point.label) for row in rows],
            name=name,
            mode="markers",
            marker={"color": colour, "size": 10},
        )
    note = f"{counted(len(front), 'point')} of {len(ranking.rows):,} on the line."
    return markup(drawn, "explore-front") + fragment(_NOTE, note=note)


def _speed(row: Explored, ranking: Ranking) -> float:
    if ranking.by_tokens:
        return row.outcome.tokens_per_s or 0.0
    return (row.outcome.p50_ns or 0) / 1e9


def _gib(row: Explored) -> float:
    return (row.outcome.held_bytes or 0) / GIB


def _table(ranking: Ranking, folder: SweepFolder) -> str:
    names = list(ranking.rows[0].point.values)
    rows = [(*row.point.values.values(), *_cells(row.outcome)) for row in ranking.rows]
    links = [
        f"points/{row.point.folder_name}/report.html" if row.outcome.status is Status.DONE else ""
        for row in ranking.rows
    ]
    return fragment(_TABLE, head=(*names, *HEAD), rows=rows, row_links=links)


def _cells(outcome: Outcome) -> list[str]:
    if outcome.status is not Status.DONE:
        return [f"{outcome.status.value}: {outcome.reason}", *[""] * (len(HEAD) - 2)]
    tokens = outcome.tokens_per_s
    return [
        *(duration(ns or 0) for ns in (outcome.step_ns, outcome.p50_ns, outcome.p95_ns)),
        "" if tokens is None else f"{tokens:,.0f}",
        "" if outcome.mfu is None else percent(outcome.mfu),
        *("" if n is None else size(n) for n in (outcome.reserved_bytes, outcome.held_bytes)),
        {True: "yes", False: "no", None: ""}[outcome.fits],
        *(
            "" if share is None else percent(share)
            for share in (outcome.computation, outcome.exposed, outcome.bubble, outcome.skew)
        ),
    ]
