"""Errors as rows: one wording for all validations that compare predictions with measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prismscale.validation.rows import Row

MEDIAN, P90, BIAS = "median error", "p90 error", "bias"
MOST_TIMES = 999.0
"""Largest ratio of a figure to its bar that is reported."""
NOBODY: Mapping[str, Sequence[float]] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Upper bounds of errors, in %; None for no bound."""

    median: float | None = None
    p90: float | None = None
    bias: float | None = None


def error_rows(
    name: str,
    error_percent: Sequence[float] | NDArray[np.float64],
    bars: Bars = Bars(),
    *,
    of: str = "rows",
    others: Mapping[str, Sequence[float] | NDArray[np.float64]] = NOBODY,
) -> Iterator[Row]:
    """Yield rows with median, p90 and bias of signed errors; no row if there are no errors.

    Args:
        name: what was predicted; the number of errors is added.
        error_percent: predicted over measured, minus 1, in %; positive is too slow.
        bars: upper bounds of the errors.
        of: noun for the things counted.
        others: errors of other predictions of the same things, by the name of their source.
    """
    if not len(error_percent):
        return
    name = f"{name} ({len(error_percent):,} {of})"
    said = {other: _figures(errors) for other, errors in others.items()}
    asked = {MEDIAN: bars.median, P90: bars.p90}
    for what, value in _figures(error_percent).items():
        row, bar = f"{name}: {what}", asked.get(what)
        told = Row.told(row, value, "%") if bar is None else Row.at_most(row, value, bar, "%")
        yield replace(told, others={other: figures[what] for other, figures in said.items()})
        if what == BIAS and bars.bias is not None:
            yield Row.at_most(f"{name}: size of the bias", abs(value), bars.bias, "%")


def _figures(error_percent: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    error = np.asarray(error_percent, float)
    size = np.abs(error)
    return {
        MEDIAN: float(np.median(size)),
        P90: float(np.quantile(size, 0.9)),
        BIAS: float(np.median(error)),
    }


def worst_first(rows: Sequence[Row]) -> list[Row]:
    """Order rows: those that miss their bar by most, those that meet it, those without a bar."""
    return sorted(rows, key=lambda row: (row.ok, -times_the_bar(row)))


def times_the_bar(row: Row) -> float:
    """Return a row's figure over its bar, or for a lower bound its bar over its figure.

    Above 1, the bar is missed. Without a bar, the ratio is 0. Where the ratio has no value, for
    example with a bar of 0, it is :data:`MOST_TIMES` for a miss, else 0."""
    if row.bar is None:
        return 0.0
    small, large = (row.value, row.bar) if row.least else (row.bar, row.value)
    if not np.isfinite(large) or small <= 0:
        return MOST_TIMES if not row.ok else 0.0
    return min(large / small, MOST_TIMES)
