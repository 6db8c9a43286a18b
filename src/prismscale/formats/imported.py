"""The result that every import of foreign traces returns."""

from __future__ import annotations

from dataclasses import dataclass

from prismscale.durations.samples import StepSamples


@dataclass(frozen=True, kw_only=True)
class ImportedTrace:
    """A trace that another program recorded."""

    samples: StepSamples
    repairs: tuple[str, ...]
    """Messages for the user: what was wrong with the trace, and how it was repaired."""
