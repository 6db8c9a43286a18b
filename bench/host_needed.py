"""The factor on the host's time with which a stored run's step is as long as it was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

from prismscale.forecast.step_calibration import StoredStep

LEAST, MOST = 0.25, 8.0
"""Factors between which one is looked for."""
HALVINGS = 12


def longer_with_host(folder: Path, factor: float) -> float:
    """Return how many times as long a run's step is with ``factor`` times the host's time.

    Raises:
        UsageError: launch logs are missing, or are of other prices than today's.
        FormatError: damaged files.
    """
    step = _stored(folder)
    return step.with_factors(1.0, factor) / step.median_ns


def host_needed(folder: Path, measured_ms: float) -> float:
    """Return the factor by which the host's time would have to be longer than the model's.

    :data:`LEAST` stands for a step that no faster host makes as short, and :data:`MOST` for one
    that no slower one makes as long.

    Args:
        folder: a run of the null device.
        measured_ms: the step as it was measured.

    Raises:
        UsageError: launch logs are missing, or are of other prices than today's.
        FormatError: damaged files.
    """
    step = _stored(folder)
    least, most = LEAST, MOST
    for _ in range(HALVINGS):
        middle = math.sqrt(least * most)
        if step.with_factors(1.0, middle) < measured_ms * 1e6:
            least = middle
        else:
            most = middle
    return least


def _stored(folder: Path) -> StoredStep:
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return StoredStep(folder=folder, step_ns=found["step_ns"], median_ns=found["spread"]["p50_ns"])
