"""What every import of foreign traces answers."""

from __future__ import annotations

from dataclasses import dataclass

from prismscale.durations.samples import StepSamples


@dataclass(frozen=True, kw_only=True)
class ImportedTrace:
    """A trace that somebody else recorded."""

    samples: StepSamples
    repairs: tuple[str, ...]
    """What was wrong with it and how it was mended, for people."""
