"""PRISM's experiments in ``report.html``: tables of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prismscale.report.html import fragment

_TABLE = """
<table><thead><tr>{% for h in head %}<th>{{ h }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table>
"""


def study_section(study: Mapping[str, Any]) -> str:
    """What ``prismscale study prism`` says of this run."""
    step, classes, placed = (fragment(_TABLE, **part(study)) for part in (_step, _classes, _placed))
    return step + classes + hot_table(study["hot"]) + placed


def hot_table(hot: Sequence[Mapping[str, Any]]) -> str:
    """What one slow node costs, by stage; nothing where none was asked for."""
    if not hot:
        return ""
    factors = sorted({h["factor"] for h in hot})
    by_stage: dict[int, dict[float, str]] = {}
    for h in hot:
        by_stage.setdefault(h["stage"], {})[h["factor"]] = f"{h['slowdown']:+.1%}"
    rows = [(f"stage {s}", *(costs[f] for f in factors)) for s, costs in sorted(by_stage.items())]
    return fragment(_TABLE, head=("one slow node at", *(f"× {f:g}" for f in factors)), rows=rows)


def _step(study: Mapping[str, Any]) -> dict[str, Any]:
    steady_ns = study["step_without_variation_ns"]
    rows = [("without variation", f"{steady_ns / 1e6:,.3f} ms")]
    rows += [
        (f"p{float(q) * 100:g}", f"{e['value'] / 1e6:,.3f} ms")
        for q, e in study["quantiles_ns"].items()
    ]
    rows += [
        (f"P(step > {factor} × median)", f"{e['value']:.2%}")
        for factor, e in study["slowdown"].items()
    ]
    return {"head": (f"step of {study['world_size']:,} ranks", study["profile"]), "rows": rows}


def _classes(study: Mapping[str, Any]) -> dict[str, Any]:
    rows = [(c["name"], f"{c['p95_gain']:z.2%}") for c in study["classes"]]
    return {"head": ("made steady", "p95 falls by"), "rows": rows}


def _placed(study: Mapping[str, Any]) -> dict[str, Any]:
    placement = study["placement"]
    rows = [
        (t["name"], f"{t['step_ns'] / 1e6:,.3f} ms", f"{t['far_ns'] / 1e6:,.3f} ms")
        for t in placement["tails"]
    ]
    head = (f"{len(placement['factors']):,} nodes placed", "step without other variation", "p95")
    return {"head": head, "rows": rows}
