"""Readers of the files of public measurements, for all kinds of kernels."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

AICONFIGURATOR_GPUS = {"a100": "a100-80g", "h100": "h100-sxm", "b200": "b200"}
"""Kernel profiles by the prefix of aiconfigurator's file names."""
SIMUMAX_PEAK = 2250e12
"""FLOP/s of a B200. SimuMax states efficiencies as shares of it."""


def table_rows(path: Path) -> Iterator[Mapping[str, str]]:
    """Yield the rows of a CSV file, which may be compressed, by the names of their columns."""
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    yield from csv.DictReader(io.StringIO(text.decode("utf-8")))


def simumax_operators(truth: Path) -> Path:
    """Return the path of SimuMax's measurements of single operators; the file may be missing."""
    return truth / "simumax_b200" / "measured_operators.json"


def simumax_shares(path: Path, operator: str) -> Iterator[tuple[Mapping[str, str], float]]:
    """Yield SimuMax's measurements of ``operator``.

    Each is the stated parameters and the share of :data:`SIMUMAX_PEAK` that was reached."""
    operators = json.loads(path.read_text(encoding="utf-8"))["accelerator"]["op"]
    measured = operators.get(operator, {}).get("accurate_efficient_factor", {})
    for text, share in measured.items():
        yield dict(re.findall(r"(\w+)=(\w+)", text)), share
