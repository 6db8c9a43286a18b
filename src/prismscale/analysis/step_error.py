"""The error bar of a modelled step, from the errors that its parts have on public rows: what nine
steps of ten should stay within.

[Note: composition] Every kind of kernel has a relative error, the 90th percentile on measurements
that it was not fitted on (``[errors]`` of its profile); communication has
:data:`COMMUNICATION_ERROR`. Calls of one kind are taken to err alike, because one law prices them
all. Kinds, communication and the host are taken to err independently, because each has constants of
its own: their shares of the step times their errors add up in squares. The host errs by
:data:`HOST_ERROR` where the device waits for it; and where a host that is slower by so much would
make the device wait, by what the step would take longer. Waiting for other ranks follows from the
rest, and errs as it does. ``prismscale validate steps`` counts how often the truth lies inside.
"""

from __future__ import annotations

from math import hypot

from prismscale.analysis.result import RunResult
from prismscale.cluster import Calibration

COMMUNICATION_ERROR = 0.24
"""p90 over 80 GPUs below 512 MiB (``prismscale validate collectives``): the largest of the rows of
16 MiB and more, on one node and on several."""
HOST_ERROR = 1.35
"""By how much more the host's time would have to be: p90 of the six steps of narrow models on A100s
beside which it was set, and which are therefore not scored (``vtrain_a100``;
``bench/vtrain_layouts.py`` finds it). Hosts differ, and so do programs: a bare operator of eager
torch takes 12 µs (NeuSight), one of Megatron-LM's 33 µs and more."""
UNKNOWN_ERROR = 0.5
"""Of a kind of kernel whose error nobody knows; what is guessed for a memory-bound kind at most."""


def step_error(result: RunResult) -> float | None:
    """Relative, to either side; None where the step is not modelled."""
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
    by_kind: dict[str, float] = {}
    for kernel in result.kernels:
        error = kernel.error if kernel.error >= 0 else UNKNOWN_ERROR
        by_kind[kernel.kind] = by_kind.get(kernel.kind, 0.0) + error * kernel.device_ns
    parts = [compute_ns * err_ns / kernels_ns for err_ns in by_kind.values()]
    slower = host_error(result.calibration)
    slow_ns = (1 + slower) * _launches_ns(result) - compute_ns - waiting_ns
    host = max(slower * waiting_ns, slow_ns)
    return hypot(*parts, host, COMMUNICATION_ERROR * exposed_ns) / working_ns


def host_error(calibration: Calibration | None) -> float:
    """What the host's time may be longer by: as measured steps leave it, or as hosts differ."""
    return HOST_ERROR if calibration is None else calibration.host_error


def _launches_ns(result: RunResult) -> float:
    """What the host takes for all ranks' launches, by those of the captured ones."""
    of_captured = sum(kernel.host_ns for kernel in result.kernels)
    ranks = sum(stage.ranks for stage in result.stages)
    return of_captured * ranks / max(len(result.captured), 1)
