"""Durations of recorded steps, under the name by which forecasts know them.

Defined in :mod:`prismscale.sim.samples`, because imports of foreign traces make them and
stand below ``forecast`` in the one direction of imports.
"""

from prismscale.sim.samples import (
    NO_MICROBATCH,
    ClassSamples,
    NodeSignature,
    RecombinedDurations,
    StepChoice,
    StepSamples,
    pipeline_places,
)

__all__ = [
    "NO_MICROBATCH",
    "ClassSamples",
    "NodeSignature",
    "RecombinedDurations",
    "StepChoice",
    "StepSamples",
    "pipeline_places",
]
