"""Errors of predicted against measured times, as accuracy tables quote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorSummary:
    """Relative errors ``|predicted / measured - 1|``, as fractions."""

    count: int
    median: float
    p90: float
    worst: float
    bias: float
    """Median of ``predicted / measured - 1``: positive where predictions are too slow."""


def summarize_errors(predicted: Sequence[float], measured: Sequence[float]) -> ErrorSummary:
    """Summary over pairs of equal position.

    Raises:
        ValueError: no pairs, sequences of different length, or a measurement that is not positive.
    """
    if not measured or len(predicted) != len(measured):
        raise ValueError(f"{len(predicted)} predictions for {len(measured)} measurements")
    truth = np.asarray(measured, dtype=np.float64)
    if truth.min() <= 0:
        raise ValueError(f"measured times must be positive, got {truth.min()}")
    signed = np.asarray(predicted, dtype=np.float64) / truth - 1.0
    errors = np.abs(signed)
    return ErrorSummary(
        count=len(errors),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        worst=float(errors.max()),
        bias=float(np.median(signed)),
    )
