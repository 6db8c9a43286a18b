"""README's table of what was measured, from the rows that benches wrote as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NONE_YET = "No bench results are recorded yet."


def bench_table(folder: Path) -> str:
    """Rows that have a bar, by bench; the files hold the others too."""
    files = sorted(folder.glob("*.json"))
    if not files:
        return NONE_YET
    lines = ["| bench | what | measured | bar | |", "|---|---|---:|---:|---|"]
    for path in files:
        bench = f"[{path.stem}](bench/results/{path.name})"
        lines += [f"| {bench} | {_cells(row)} |" for row in _rows(path) if row["bar"] is not None]
    return "\n".join(lines)


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = json.loads(path.read_text())
    fields = {"name", "value", "unit", "bar", "ok"}
    if not isinstance(rows, list) or any(not fields <= row.keys() for row in rows):
        sys.exit(f"{path.name}: not a list of rows {sorted(fields)}; write it with --json")
    return rows


def _cells(row: dict[str, Any]) -> str:
    verdict = "met" if row["ok"] else "**missed**"
    name = row["name"].replace("|", "\\|")
    return f"{name} | {_figure(row, 'value')} | {_direction(row)} {_figure(row, 'bar')} | {verdict}"


def _direction(row: dict[str, Any]) -> str:
    """Rows do not say which way their bar points; value and verdict together do."""
    if row["value"] is None:
        return ""
    return "≤" if (row["value"] <= row["bar"]) == row["ok"] else "≥"


def _figure(row: dict[str, Any], field: str) -> str:
    value = row[field]
    if value is None:
        return "not finite"
    shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{shown} {row['unit']}".rstrip()
