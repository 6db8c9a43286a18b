"""The error bar of a modelled step, from the errors that its parts have on public rows: what nine
measured steps of ten should lie within.

[Note: composition] Every kind of kernel has a relative error, the 90th percentile on measurements
that it was not fitted on (``[errors]`` of its profile); communication has
:data:`COMMUNICATION_ERROR`. Such an error is of a measured time: what is predicted too short by
30 % took 1/0.7 of it, what is too long by 30 % took 1/1.3. Calls of one kind are taken to err
alike, because one law prices them all. Kinds, communication and the host are taken to err
independently, because each has constants of its own: their shares of the step times their errors
add up in squares.

The host is slower by :data:`HOST_SLOWER`, or faster by :data:`HOST_FASTER`, where the device waits
for it; and where a host that is slower by so much would make the device wait, by what the step
would take longer. Waiting for other ranks follows from the rest, and errs as it does. ``prismscale
validate steps`` counts how often the truth lies inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

from prismscale.analysis.emulated import KernelKind
from prismscale.analysis.result import RunResult
from prismscale.cluster import Calibration

COMMUNICATION_ERROR = 0.24
"""p90 over 80 GPUs below 512 MiB (``prismscale validate collectives``): the largest of the rows of
16 MiB and more, on one node and on several."""
HOST_SLOWER = 1.35
"""By how much more the host's time would have to be: p90 of the six steps of narrow models on A100s
beside which it was set, and which are therefore not scored (``vtrain_a100``;
``bench/vtrain_layouts.py`` finds it). Hosts differ, and so do programs."""
HOST_FASTER = 0.6
"""By how much less: a bare operator of eager torch takes 12 µs (NeuSight), of the model's 30."""
UNKNOWN_ERROR = 0.5
"""Of a kind of kernel whose error nobody knows; what is guessed for a memory-bound kind at most."""
MOST_TOO_SHORT = 0.5
"""The largest error that is taken for one of too short predictions. No prediction is too short by
more than the whole measured time, so larger errors come from predictions that are too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBar:
    """Nine measured steps of ten lie between 1 - ``below`` and 1 + ``above`` of the predicted."""

    below: float
    above: float

    @classmethod
    def of_error(cls, error: float) -> ErrorBar:
        """Of what has been off by ``error`` of the measured time, in either direction."""
        too_short = min(error, MOST_TOO_SHORT)
        return cls(below=error / (1 + error), above=too_short / (1 - too_short))

    def holds(self, ratio: float) -> bool:
        """Whether a step that took ``ratio`` of the predicted one lies inside."""
        return 1 - self.below <= ratio <= 1 + self.above


def step_error(result: RunResult) -> ErrorBar | None:
    """None where the step is not modelled."""
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
    longer = max(host.above * waiting_ns, slow_ns)
    return ErrorBar(
        below=hypot(*(ns * bar.below for ns, bar in bars), host.below * waiting_ns) / working_ns,
        above=hypot(*(ns * bar.above for ns, bar in bars), longer) / working_ns,
    )


def _kinds(kernels: Sequence[KernelKind]) -> dict[str, tuple[int, float]]:
    """Time and error of each kind: its sources' together, by their times."""
    found: dict[str, tuple[int, float]] = {}
    for kernel in kernels:
        error = kernel.error if kernel.error >= 0 else UNKNOWN_ERROR
        before_ns, before = found.get(kernel.kind, (0, 0.0))
        total_ns = before_ns + kernel.device_ns
        mean = (before * before_ns + error * kernel.device_ns) / total_ns if total_ns else error
        found[kernel.kind] = total_ns, mean
    return found


def host_error(calibration: Calibration | None) -> ErrorBar:
    """Of the host's time: as measured steps leave it, or as hosts differ."""
    if calibration is None:
        return ErrorBar(below=HOST_FASTER, above=HOST_SLOWER)
    error = calibration.host_error
    return ErrorBar(below=error / (1 + error), above=error)


def _launches_ns(result: RunResult) -> float:
    """What the host takes for all ranks' launches, by those of the captured ones."""
    of_captured = sum(kernel.host_ns for kernel in result.kernels)
    ranks = sum(stage.ranks for stage in result.stages)
    return of_captured * ranks / max(len(result.captured), 1)
