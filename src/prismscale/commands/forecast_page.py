"""Forecasts in a run's ``report.html``: distribution, guarantees, sensitivity, placement.

The sections are made from the ``forecast`` member of ``results.json``, so each command renews the
whole of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from prismscale.commands.study.study_page import hot_table, study_section
from prismscale.commands.what_if.what_if_page import what_if_section
from prismscale.files import write_text
from prismscale.report.folder import read_run, write_page
from prismscale.report.html import Section, fragment, render_page
from prismscale.report.plots import OBSERVED, figure, markup, plain
from prismscale.runfolder import RunFolder

FIRST_ORDER = 70.0
"""After the sections of a run."""
BINS = 60
MOST_BARS = 20

MOST_POOLS = 200

_TABLE = """
<table><thead><tr>{% for h in head %}<th>{{ h }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table>
"""
_FOLDED = f"<details><summary>{{{{ title }}}}</summary>{_TABLE}</details>"
_NOTES = "<ul>{% for note in notes %}<li>{{ note }}</li>{% endfor %}</ul>"


def write_forecast(run: Path, found: Mapping[str, Any]) -> None:
    """Put the sections of a forecast into the run's report; a folder that holds no run (an
    import) gets a report of them alone.

    Raises:
        StorageError: the report cannot be written. FormatError: the run's files are damaged.
    """
    folder = RunFolder(root=run)
    sections = sections_of(found)
    if folder.timeline.exists():
        write_page(folder, *read_run(folder), sections)
    else:
        write_text(folder.report, render_page("Forecast", sections, subtitle=str(run.name)))


def sections_of(found: Mapping[str, Any]) -> list[Section]:
    """The sections for what was computed so far."""
    made = [
        (title, build(found[name]) + _notes(found[name]["notes"]))
        for name, title, build in (
            ("step", "Forecast", _forecast),
            ("what_if", "What if", what_if_section),
            ("sensitivity", "Sensitivity", _sensitivity),
            ("placement", "Placement", _placement),
            ("prism", "PRISM's experiments", study_section),
        )
        if name in found
    ]
    return [
        Section(title=title, html=html, order=FIRST_ORDER + i)
        for i, (title, html) in enumerate(made)
    ]


def _forecast(forecast: Mapping[str, Any]) -> str:
    parts = (_distribution, _guarantees, _spread, _training)
    return "".join(part(forecast) for part in parts) + _pools(forecast["pools"])


def _distribution(forecast: Mapping[str, Any]) -> str:
    drawn, measured = (
        np.array(forecast[key], dtype=np.float64) / 1e6 for key in ("step_ns", "measured_ns")
    )
    density = figure(height=280, xaxis_title="step, ms", yaxis_title="share", barmode="overlay")
    cumulative = figure(height=280, xaxis_title="step, ms", yaxis_title="probability")
    everything = np.concatenate([drawn, measured])
    edges = np.linspace(everything.min(), everything.max() + 1e-9, BINS + 1)
    shown = (("forecast", drawn, OBSERVED[1]), ("measured", measured, OBSERVED[0]))
    for name, values, colour in shown:
        if len(values):
            share, _ = np.histogram(values, edges)
            middle = (edges[1:] + edges[:-1]) / 2
            density.add_bar(
                x=middle, y=share / len(values), name=name, marker_color=colour, opacity=0.6
            )
            cumulative.add_trace(_cdf(values, name, colour))
    return markup(density, "forecast-density") + markup(cumulative, "forecast-cdf")


def _cdf(values: NDArray[np.float64], name: str, colour: str) -> go.Scatter:
    ordered = np.sort(values)
    height = (np.arange(len(ordered)) + 1) / len(ordered)
    return go.Scatter(x=ordered, y=height, name=name, line={"color": colour, "shape": "hv"})


def _guarantees(forecast: Mapping[str, Any]) -> str:
    rows = [
        (
            f"step, p{float(q) * 100:g}",
            f"{e['value'] / 1e6:,.3f} ms",
            f"{e['low'] / 1e6:,.3f} … {e['high'] / 1e6:,.3f}",
        )
        for q, e in forecast["quantiles_ns"].items()
    ]
    slow = forecast["slowdown"]
    rows.append(
        (
            f"P(step > {slow['factor']:g} × median)",
            f"{slow['value']:.2%}",
            f"{slow['low']:.2%} … {slow['high']:.2%}",
        )
    )
    training = forecast["training"]
    rows += [
        (f"{training['steps']:,} steps, p{float(q) * 100:g}", f"{days:,.2f} days", "")
        for q, days in training["days"].items()
    ]
    rows += [
        (
            f"step at {w['width']:g} × as many replicas, p95",
            f"{w['p95_ns'] / 1e6:,.3f} ms",
            "at most",
        )
        for w in forecast["width"]
        if w["width"] > 1 and w["resolved"]
    ]
    return fragment(_TABLE, head=("guarantee", "value", "95 % interval"), rows=rows)


def _spread(forecast: Mapping[str, Any]) -> str:
    """What differs from step to step and from run to run, and by which source; nothing where draws
    do not tell."""
    spread = forecast["spread"]
    if spread is None:
        return ""
    log = spread["log"]
    rows = [
        ("median step over the step without variation", f"{forecast['variation_cost']:+.2%}"),
        ("from step to step of one run, CV", f"{spread['within_cv']:.2%}"),
        ("from run to run, on other machines, CV", f"{spread['between_cv']:.2%}"),
        (f"in a log of {log['steps']:,} steps, CV", f"{log['cv']:.2%}"),
        *((f"{s['name']}, of p95 - p50", f"{s['share']:.0%}") for s in forecast["sources"]),
    ]
    return fragment(_TABLE, head=("variation", ""), rows=rows)


def _training(forecast: Mapping[str, Any]) -> str:
    """Where the days of training go."""
    training = forecast["training"]
    rows = [(name, f"{days:,.2f}") for name, days in training["parts_days"].items() if days]
    rows.append(("GPU-hours", f"{training['gpu_hours']:,.0f}"))
    for name, key in (
        ("used", "checkpoint_interval_s"),
        ("with the fewest days", "best_interval_s"),
    ):
        if training[key] is not None:
            rows.append((f"seconds between checkpoints, {name}", f"{training[key]:,.0f}"))
    return fragment(_TABLE, head=("the training, on average", "days"), rows=rows)


def _pools(pools: Sequence[Mapping[str, Any]]) -> str:
    """How well each fitted distribution describes its pool; nothing where recorded steps are
    recombined."""
    if not pools:
        return ""
    rows = [
        (
            p["name"],
            p["distribution"],
            f"{p['n']:,}",
            f"{p['ks']:.3f}",
            f"{p['temporal_cv']:.1%}",
            f"{p['spatial_cv']:.1%}",
            p["note"],
        )
        for p in pools[:MOST_POOLS]
    ]
    head = ("pool", "distribution", "durations", "KS", "over time", "between ranks", "")
    more = f" ({MOST_POOLS} of {len(pools)} shown)" if len(pools) > MOST_POOLS else ""
    return fragment(_FOLDED, title=f"Pools and their distributions{more}", head=head, rows=rows)


def _notes(notes: Sequence[str]) -> str:
    return fragment(_NOTES, notes=notes) if notes else ""


def _sensitivity(sensitivity: Mapping[str, Any]) -> str:
    rows = [
        (
            i["name"],
            f"{i['first']:.2f} ± {i['first_error']:.2f}",
            f"{i['total']:.2f} ± {i['total_error']:.2f}",
        )
        for i in sensitivity["sobol"]
    ]
    head = ("share of the variance of the step", "alone", "with interactions")
    return _tornado(sensitivity) + (fragment(_TABLE, head=head, rows=rows) if rows else "")


def _tornado(sensitivity: Mapping[str, Any]) -> str:
    shown = sorted(sensitivity["ablations"], key=lambda a: abs(a["p95_gain"]))[-MOST_BARS:]
    drawn = figure(height=80 + 24 * len(shown), xaxis_title="p95 falls by, %")
    drawn.add_bar(
        x=[a["p95_gain"] * 100 for a in shown],
        y=[plain(a["name"]) for a in shown],
        orientation="h",
        marker_color=OBSERVED[1],
    )
    return markup(drawn, "forecast-tornado")


def _placement(placement: Mapping[str, Any]) -> str:
    node_slots = placement["node_slots"]
    stages = sorted({s["stage"] for s in node_slots})
    replicas = sorted({s["replica"] for s in node_slots})
    factor = np.full((len(stages), len(replicas)), np.nan)
    text = np.full(factor.shape, "", dtype=object)
    for node_slot in node_slots:
        at = stages.index(node_slot["stage"]), replicas.index(node_slot["replica"])
        factor[at] = node_slot["factor"]
        text[at] = plain(
            f"{node_slot['node']}: ranks {node_slot['ranks'][0]}-{node_slot['ranks'][-1]}"
        )
    drawn = figure(
        height=100 + 32 * len(stages), xaxis_title="replica", yaxis_title="pipeline stage"
    )
    drawn.update_xaxes(type="category")
    drawn.add_heatmap(
        z=factor,
        x=[str(r) for r in replicas],
        y=[f"stage {s}" for s in stages],
        text=text,
        hovertemplate="%{text}<br>factor %{z:.3f}<extra></extra>",
        colorscale=[[0, "#e8eef5"], [1, OBSERVED[0]]],
    )
    rows = [
        (name, f"{placement[key] / 1e6:,.3f} ms")
        for name, key in (("given order", "given_ns"), ("best", "best_ns"), ("worst", "worst_ns"))
    ]
    table = fragment(_TABLE, head=(placement["compared"], ""), rows=rows)
    return markup(drawn, "forecast-placement") + table + hot_table(placement["hot"])
