"""The error bar of a modelled step, composed from the errors of its parts on public measurements.

Nine of ten measured steps should lie within the bar.

[Note: composition] Every kind of kernel has a relative error: the 90th percentile on measurements
that it was not fitted on (``[errors]`` of its profile). Communication has
:data:`COMMUNICATION_ERROR`. Such an error is relative to the measured time: where a prediction is
30 % too short, the measured time is 1/0.7 of it; where it is 30 % too long, 1/1.3. Calls of one
kind are assumed to err alike, because one law gives all their costs. Kinds, communication and the
host are assumed to err independently, because each has its own constants: their shares of the step
times their errors add up in squares.

The host may be slower by :data:`HOST_SLOWER`, or faster by :data:`HOST_FASTER`. This counts where
the device waits for the host. If such a slower host would make the device wait elsewhere, the time
by which the step would be longer counts: what its launches take beyond the work that they overlap
with, but at most :data:`HOST_SLOWER` of the step, because a step of which all parts take so much
longer is no longer than that. Waiting for other ranks follows from the other parts and
has their error. ``prismscale validate steps`` counts how often the truth lies inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

from prismscale.analysis.emulated import KernelKind
from prismscale.analysis.result import RunResult
from prismscale.cluster import Calibration

COMMUNICATION_ERROR = 0.24
"""90th percentile over 80 GPUs below 512 MiB (``prismscale validate collectives``): the largest of
the rows of 16 MiB and more, on one node and on several."""
HOST_SLOWER = 0.49
"""Fraction by which the host's time may be longer: p90 of the 23 tests of Megatron-LM on which it
was fitted (``tools/fit/fit_host.py``). Hosts differ, and so do programs."""
HOST_FASTER = 0.8
"""Fraction by which it may be shorter: a bare operator of eager torch takes 12 µs (NeuSight), where
the model has 61 µs."""
UNKNOWN_ERROR = 0.5
"""Error of a kind of kernel whose error is unknown; the largest guess for a memory-bound kind."""
MOST_TOO_SHORT = 0.5
"""Largest error that counts for predictions that are too short. None can be too short by more than
the whole measured time, so larger errors come from predictions that are too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBar:
    """Nine of ten measured steps lie between 1 - ``below`` and 1 + ``above`` of the prediction."""

    below: float
    above: float

    @classmethod
    def of_error(cls, error: float) -> ErrorBar:
        """Make the bar of predictions that err by ``error`` of the measured time, either way."""
        too_short = min(error, MOST_TOO_SHORT)
        return cls(below=error / (1 + error), above=too_short / (1 - too_short))

    def holds(self, ratio: float) -> bool:
        """Whether a step that took ``ratio`` times the predicted one lies inside."""
        return 1 - self.below <= ratio <= 1 + self.above


def step_error(result: RunResult) -> ErrorBar | None:
    """Compose the error bar of the step; None where the step is not modelled or hangs."""
    if result.device != "null" or result.hung:
        return None
    kernels_ns = sum(kernel.device_ns for kernel in result.kernels)
    breakdowns = [(stage.ranks, stage.breakdown) for stage in result.stages]
    waiting_ns = sum(ranks * b.host_ns for ranks, b in breakdowns)
    compute_ns = sum(ranks * b.total_compute_ns for ranks, b in breakdowns) - waiting_ns
    exposed_ns = sum(ranks * b.total_exposed_ns for ranks, b in breakdowns)
    working_ns = compute_ns + waiting_ns + exposed_ns
    if not kernels_ns or not working_ns:
        return None
    parts = [
        (compute_ns * kind_ns / kernels_ns, error)
        for kind_ns, error in _kinds(result.kernels).values()
    ]
    parts.append((exposed_ns, COMMUNICATION_ERROR))
    bars = [(part_ns, ErrorBar.of_error(error)) for part_ns, error in parts]
    host = host_error(result.calibration)
    slow_ns = (1 + host.above) * _launches_ns(result) - compute_ns - waiting_ns
    longer = min(max(host.above * waiting_ns, slow_ns), host.above * working_ns)
    return ErrorBar(
        below=hypot(*(ns * bar.below for ns, bar in bars), host.below * waiting_ns) / working_ns,
        above=hypot(*(ns * bar.above for ns, bar in bars), longer) / working_ns,
    )


def _kinds(kernels: Sequence[KernelKind]) -> dict[str, tuple[int, float]]:
    """Return time and error of each kind; errors of its sources are weighted by their times."""
    found: dict[str, tuple[int, float]] = {}
    for kernel in kernels:
        error = kernel.error if kernel.error >= 0 else UNKNOWN_ERROR
        before_ns, before = found.get(kernel.kind, (0, 0.0))
        total_ns = before_ns + kernel.device_ns
        mean = (before * before_ns + error * kernel.device_ns) / total_ns if total_ns else error
        found[kernel.kind] = total_ns, mean
    return found


def host_error(calibration: Calibration | None) -> ErrorBar:
    """Return the error bar of the host's time, from calibration or from how hosts differ."""
    if calibration is None:
        return ErrorBar(below=HOST_FASTER, above=HOST_SLOWER)
    error = calibration.host_error
    return ErrorBar(below=error / (1 + error), above=error)


def _launches_ns(result: RunResult) -> float:
    """Scale the host's launch time from the captured ranks to all ranks."""
    of_captured = sum(kernel.host_ns for kernel in result.kernels)
    ranks = sum(stage.ranks for stage in result.stages)
    return of_captured * ranks / max(len(result.captured), 1)
