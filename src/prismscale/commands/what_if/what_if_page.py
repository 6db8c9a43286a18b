"""What-ifs in ``report.html``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prismscale.analysis.attribution import Breakdown
from prismscale.commands.what_if.what_if_table import (
    EFFECT_HEADS,
    FIGURE_HEADS,
    PART_HEADS,
    effect_rows,
    figure_rows,
    stage_rows,
)
from prismscale.durations.what_if.effects import Effect
from prismscale.forecast.hoped_run import HopedRun, HopedStage, Side
from prismscale.report.html import fragment

_TABLE = """
<table><thead><tr>{% for h in head %}<th>{{ h }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table>
"""


def what_if_section(values: Mapping[str, Any]) -> str:
    """The tables that the terminal shows, of all stages."""
    found = _read(values)
    stages = (
        fragment(_TABLE, head=(f"{s.name}, {s.unit}", *PART_HEADS[1:]), rows=s.rows)
        for s in stage_rows(found)
    )
    return "".join(
        (
            fragment(_TABLE, head=EFFECT_HEADS, rows=effect_rows(found)),
            fragment(_TABLE, head=FIGURE_HEADS, rows=figure_rows(found)),
            *stages,
        )
    )


def _read(values: Mapping[str, Any]) -> HopedRun:
    rows = [dict(row) for row in values["what_ifs"]]
    alone_ns = tuple(row.pop("alone_step_ns") for row in rows)
    return HopedRun(
        before=_side(values["before"]),
        after=_side(values["after"]),
        effects=tuple(Effect(**row) for row in rows),
        alone_ns=alone_ns,
    )


def _side(values: Mapping[str, Any]) -> Side:
    return Side(
        step_ns=values["step_ns"],
        stages=tuple(
            HopedStage(name=s["name"], ranks=s["ranks"], breakdown=Breakdown(**s["breakdown"]))
            for s in values["stages"]
        ),
        quantile_ns={float(q): ns for q, ns in values["quantiles_ns"].items()},
        notes=(),
    )
