"""Forecasts in a run's ``report.html``: distribution, guarantees, sensitivity, placement.

The sections are made from ``forecast.json``, so each command renews the whole of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from prismscale.files import write_text
from prismscale.report.folder import read_run, write_page
from prismscale.report.html import Section, fragment, render_page
from prismscale.report.plots import OBSERVED, PREDICTED, figure, markup, plain
from prismscale.runfolder import RunFolder

FIRST_ORDER = 70.0
"""After the sections of a run."""
BINS = 60
MOST_BARS = 20

_TABLE = """
<table><thead><tr>{% for h in head %}<th>{{ h }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table>
"""


def write_forecast(run: Path, found: Mapping[str, Any]) -> None:
    """Put the sections of ``forecast.json`` into the run's report; an imported run gets a report of
    them alone.

    Raises:
        StorageError: the report cannot be written. FormatError: the run's files are damaged.
    """
    folder = RunFolder(root=run)
    sections = sections_of(found)
    if folder.results.exists():
        write_page(folder, *read_run(folder), sections)
    else:
        write_text(folder.report, render_page("Forecast", sections, subtitle=str(run.name)))


def sections_of(found: Mapping[str, Any]) -> list[Section]:
    """The sections for what was computed so far."""
    made = []
    if "forecast" in found:
        made.append(("Forecast", _distribution(found["forecast"]) + _guarantees(found["forecast"])))
    if "sensitivity" in found:
        made.append(("Sensitivity", _tornado(found["sensitivity"])))
    if "placement" in found:
        made.append(("Placement", _placement(found["placement"])))
    return [
        Section(title=title, html=html, order=FIRST_ORDER + i)
        for i, (title, html) in enumerate(made)
    ]


def _distribution(forecast: Mapping[str, Any]) -> str:
    drawn = np.asarray(forecast["step_ns"], dtype=np.float64) / 1e6
    measured = np.asarray(forecast.get("measured_ns", []), dtype=np.float64) / 1e6
    density = figure(height=280, barmode="overlay", xaxis_title="step time, ms")
    cumulative = figure(height=280, xaxis_title="step time, ms", yaxis_title="probability")
    everything = np.concatenate([drawn, measured])
    edges = np.linspace(everything.min(), everything.max() + 1e-9, BINS + 1)
    shown = (("forecast", drawn, OBSERVED[1]), ("measured", measured, PREDICTED))
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
    rows += [
        (f"training, p{float(q) * 100:g}", f"{days:,.2f} days", "")
        for q, days in forecast["training_days"].items()
    ]
    return fragment(_TABLE, head=("guarantee", "value", "95 % interval"), rows=rows)


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
    seats = placement["seats"]
    stages = sorted({s["stage"] for s in seats})
    replicas = sorted({s["replica"] for s in seats})
    factor = np.full((len(stages), len(replicas)), np.nan)
    text = np.full(factor.shape, "", dtype=object)
    for seat in seats:
        at = stages.index(seat["stage"]), replicas.index(seat["replica"])
        factor[at] = seat["factor"]
        text[at] = plain(f"{seat['node']}: ranks {seat['ranks'][0]}-{seat['ranks'][-1]}")
    drawn = figure(
        height=100 + 32 * len(stages), xaxis_title="replica", yaxis_title="pipeline stage"
    )
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
    table = fragment(_TABLE, head=(f"p{placement['quantile'] * 100:g} of the step", ""), rows=rows)
    return markup(drawn, "forecast-placement") + table
