"""Errors as rows: one wording for every validation that holds predictions against measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.validation.rows import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """What errors may be at most, in %; None where nothing is asked."""

    median: float | None = None
    p90: float | None = None
    bias: float | None = None


def error_rows(
    name: str,
    error_percent: Sequence[float] | NDArray[np.float64],
    bars: Bars = Bars(),
    *,
    of: str = "rows",
) -> Iterator[Row]:
    """Median, p90 and bias of signed errors; nothing where there are none.

    Args:
        name: what was predicted; how many there are is added.
        error_percent: predicted over measured less one, in %: positive is too slow.
        bars: what is asked.
        of: what is counted.
    """
    error = np.asarray(error_percent, float)
    if not len(error):
        return
    name = f"{name} ({len(error):,} {of})"
    size = np.abs(error)
    figures = (
        ("median error", float(np.median(size)), bars.median),
        ("p90 error", float(np.quantile(size, 0.9)), bars.p90),
    )
    for what, value, bar in figures:
        row = f"{name}: {what}"
        yield Row.told(row, value, "%") if bar is None else Row.at_most(row, value, bar, "%")
    bias = float(np.median(error))
    yield Row.told(f"{name}: bias", bias, "%")
    if bars.bias is not None:
        yield Row.at_most(f"{name}: size of the bias", abs(bias), bars.bias, "%")


def worst_first(rows: Sequence[Row]) -> list[Row]:
    """Rows that miss their bar by the most, then those that meet it, then those without one."""
    return sorted(rows, key=lambda row: -row.value / row.bar if row.bar else 1.0)
