"""What was measured, from the rows that benches wrote as JSON: a summary and the tables."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prismscale.analysis.known_errors import HOST_BOUND
from prismscale.validation.steps.recorded_step import Provenance

NONE_YET = "No bench results are recorded yet."


def bench_summary(folder: Path) -> str:
    """A line for each bench, and every figure that misses its bar."""
    lines = ["| bench | figures | with a bar | met | missed |", "|---|---:|---:|---:|---|"]
    for path in sorted(folder.glob("*.json")):
        every = _rows(path)
        rows = [row for row in every if row["bar"] is not None]
        missed = [row for row in rows if not row["ok"]]
        told = "<br>".join(_sentence(row) for row in missed)
        link = f"[{path.stem}](#{path.stem})"
        met = len(rows) - len(missed)
        lines.append(f"| {link} | {len(every)} | {len(rows)} | {met} | {told} |")
    return "\n".join(lines) if len(lines) > 2 else NONE_YET


def bench_tables(folder: Path) -> str:
    """Every row, by bench: without a bar, too, or what is worst would stand nowhere."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        lines += [f"## {path.stem}", "", f"[rows](../bench/results/{path.name})", ""]
        lines += ["| what | measured | bar | |", "|---|---:|---:|---|"]
        lines += [f"| {_cells(row)} |" for row in _rows(path)]
        lines.append("")
    return "\n".join(lines) or NONE_YET


def studied_rows(folder: Path) -> str:
    """Steps of 405B by ranks and profile, from the rows of ``bench/variation.py``."""
    found: dict[tuple[int, str], dict[str, float]] = {}
    for row in _rows(folder / "variation.json"):
        named = re.fullmatch(r"405B on ([\d,]+), profile ([\w-]+): (.+)", row["name"])
        if named:
            key = int(named[1].replace(",", "")), named[2]
            found.setdefault(key, {})[named[3]] = row["value"]
    lines = [
        "| ranks | profile | step without variation | p5, p50, p95 | p50 over it | p5, p95 from p50 |",
        "|---:|---|---:|---|---:|---|",
    ]
    order = ("measured", "prism-low", "prism-high")
    for (ranks, profile), row in sorted(
        found.items(), key=lambda f: (f[0][0], order.index(f[0][1]))
    ):
        quantiles = ", ".join(f"{row[q]:.2f}" for q in ("p5", "p50", "p95"))
        lines.append(
            f"| {ranks:,} | `{profile}` | {row['step without variation']:.2f} s | {quantiles} s "
            f"| {row['p50 over the step without variation']:+.1f} % "
            f"| {row['p5 over p50']:+.1f}, {row['p95 over p50']:+.1f} % |"
        )
    lines.append(
        "| PRISM, 64k | of one fleet | | 18.6, 18.8, 19.3 s | 9 % observed | -1.1, +2.7 % |"
    )
    return "\n".join(lines)


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = json.loads(path.read_text())
    fields = {"name", "value", "unit", "bar", "least", "ok"}
    if not isinstance(rows, list) or any(not fields <= row.keys() for row in rows):
        sys.exit(f"{path.name}: not a list of rows {sorted(fields)}; write it with --json")
    return rows


def _cells(row: dict[str, Any]) -> str:
    name = row["name"].replace("|", "\\|")
    note = row.get("note", "").replace("|", "\\|")
    if row["bar"] is None:
        return f"{name} | {_figure(row, 'value')} | | {note}"
    verdict = "; ".join(filter(None, ("met" if row["ok"] else "**missed**", note)))
    return f"{name} | {_figure(row, 'value')} | {_direction(row)} {_figure(row, 'bar')} | {verdict}"


def _sentence(row: dict[str, Any]) -> str:
    name = row["name"].replace("|", "\\|")
    return f"{name}: {_figure(row, 'value')} ({_direction(row)} {_figure(row, 'bar')})"


def _direction(row: dict[str, Any]) -> str:
    return "≥" if row["least"] else "≤"


def _figure(row: dict[str, Any], field: str) -> str:
    value = row[field]
    if value is None:
        return "not finite"
    shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{shown} {row['unit']}".rstrip()


KNOWN = {
    ("allocated", ""): (
        ("megatron_goldens", ": peak "),
        ("simumax_records", ": allocated"),
        ("bridge_cards", ": allocated, off by"),
    ),
    ("reserved", ""): (
        ("null_programs", "reserved memory, rel"),
        ("simumax_records", ": reserved"),
        ("bridge_cards", ": reserved, off by"),
    ),
    ("step", "h100"): (
        ("null_programs", "tokens/s a GPU, rel"),
        ("bridge_cards", "H100: step, off by"),
        ("bridge_steps", "h100: step "),
    ),
    (HOST_BOUND, "h100"): (("megatron_golden_steps", ": step "),),
    ("step", "gb200"): (
        ("bridge_cards", "GB200: step, off by"),
        ("bridge_steps", "gb200: step "),
    ),
    ("step", "gb300"): (("bridge_steps", "gb300: step "),),
    ("step", "b300"): (("bridge_steps", " b300: step "),),
    ("step", "b200"): (("simumax_records", ": step "),),
    ("step", "a100"): (("vtrain_layouts", ": step "),),
}
"""Figure and GPU, and the rows (bench, part of the name) that hold it against measurements. Those
of steps are of steps without variation."""
MEDIAN = ": forecast's median step"
"""The step that a run shows: of the same subject as a row of its step."""


def known_errors(folder: Path) -> str:
    """``known_errors.toml``: what a run says of the error of its figures. Rows by which something
    was found are not scored, and do not count."""
    parts = ["# Made by scripts/generate-docs of bench/results; see analysis/known_errors.py."]
    for (figure, gpu), sources in KNOWN.items():
        errors = sorted(
            abs(error)
            for bench, part in sources
            for error in _errors(_rows(folder / f"{bench}.json"), part)
        )
        if not errors:
            continue
        benches = ", ".join(f'"{bench}"' for bench, _ in sources)
        parts += [
            "",
            "[[known]]",
            f'figure = "{figure}"',
            f'gpu = "{gpu}"',
            f"cases = {len(errors)}",
            f"median = {statistics.median(errors):.3g}",
            f"worst = {errors[-1]:.3g}",
            f"benches = [{benches}]",
        ]
    return "\n".join(parts) + "\n"


def _errors(rows: list[dict[str, Any]], part: str) -> Iterator[float]:
    """Of the figures that runs show, relative, by rows whose name has ``part``."""
    value = {row["name"]: row["value"] for row in rows}
    for row in rows:
        name = row["name"]
        if part not in name or "not scored" in name:
            continue
        error = row["value"] / (100 if row["unit"] == "%" else 1)
        case = name.partition(": ")[0]
        shown_ms = value.get(case + MEDIAN)
        if shown_ms and (found := re.search(r": step ([\d.,]+) of ", name)):
            error = (1 + error) * shown_ms / float(found[1].replace(",", "")) - 1
        elif shown_ms and (found := re.search(r"tokens/s a GPU, relative to ([\d.]+)", name)):
            tokens = value[f"{case}: tokens/s a GPU"] * value[f"{case}: step"] / shown_ms
            error = tokens / float(found[1]) - 1
        yield error


STEPS = (
    ("simumax", "simumax_records", re.compile(r"(.+): step ([\d.,]+) of ")),
    ("torchtitan", "null_programs", re.compile(r"(.+): step$")),
    ("vtrain", "vtrain_layouts", re.compile(r"(.+): step ([\d.,]+) of ")),
    ("bridge", "bridge_steps", re.compile(r"(.+): step ([\d.,]+) of ")),
    ("golden", "megatron_golden_steps", re.compile(r"(.+): step ([\d.,]+) of ")),
)
"""Family, bench, and the rows that hold a case's step in ms: in their name, or as their value."""


def recorded_steps(folder: Path) -> str:
    """``recorded_steps.toml``: the steps that programs were predicted to take."""
    parts = [
        "# Made by scripts/generate-docs of bench/results; see validation/steps/recorded_step.py."
    ]
    for family, bench, pattern in STEPS:
        rows = _rows(folder / f"{bench}.json")
        medians = {r["name"].removesuffix(MEDIAN): r["value"] for r in rows if MEDIAN in r["name"]}
        for row in rows:
            if found := pattern.match(row["name"]):
                parts += ["", *_recorded(family, found, row, medians.get(found[1]))]
    return "\n".join(parts) + "\n"


def _recorded(
    family: str, found: re.Match[str], row: dict[str, Any], median_ms: float | None
) -> list[str]:
    step_ms = float(found[2].replace(",", "")) if found.lastindex == 2 else row["value"]
    lines = ["[[step]]", f'family = "{family}"', f'case = "{found[1]}"']
    lines.append(f"step_ms = {step_ms:.2f}")
    if median_ms is not None:
        lines.append(f"median_ms = {median_ms:.2f}")
    by = Provenance.parse(row.get("note", ""))
    if by is not None:
        if by.bar is not None:
            lines.append(f"bar = {{ below = {by.bar.below:.3f}, above = {by.bar.above:.3f} }}")
        lines += [f'prices = "{by.prices}"', f'commit = "{by.commit}"']
    return lines
