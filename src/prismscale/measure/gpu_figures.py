"""Figures that measuring processes on a GPU write for the process that started them.

This module does not import torch, because the reader needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

WARM_UP = 4
"""First steps of a plain run, which are left out of a median."""
TRACED_STEPS = 2
"""Last steps of a plain run, which torch's profiler records if asked to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainFigures:
    """Figures of one rank of a program run plainly (:mod:`prismscale.measure.plain_program`)."""

    step_ns: tuple[int, ...]
    """From the end of each step to the end of the next: one fewer than steps."""
    peak_bytes: int
    reserved_bytes: int
    operations: Mapping[str, int] = field(default_factory=dict)
    """Calls of each torch operation, where they were counted."""
    kernels: Mapping[str, int] = field(default_factory=dict)
    """Launches of each kernel in the last :data:`TRACED_STEPS` steps, where they were traced."""
    kernel_ns: Mapping[str, int] = field(default_factory=dict)
    """Total time of those launches."""

    @property
    def median_step_ns(self) -> float:
        """Median of the steps after the first ones and before those that were traced."""
        return median(self.step_ns[WARM_UP : -TRACED_STEPS if self.kernels else None])

    @property
    def kernel_ns_per_step(self) -> float:
        """Time of all kernels of a traced step."""
        return sum(self.kernel_ns.values()) / TRACED_STEPS


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldFigures:
    """Figures of streams that were held (:mod:`prismscale.measure.held_streams`)."""

    asked_ns: tuple[int, ...]
    late_us: tuple[tuple[float, ...], ...]
    """For each of :attr:`asked_ns`, how much later than asked the stream went on, each time."""


def error_path(out: Path) -> Path:
    """Return the file in which a rank that should have written ``out`` says why it failed."""
    return out.with_suffix(".error.json")
