"""Clocks of the benches on a GPU, and the file that they write."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from prismscale.files import write_json
from prismscale.measure.gpu_machine import describe_machine
from prismscale.measure.kernel_timing import CudaStopwatch

REPEATS = 7


def device_ns(run: Callable[[], object], *, calls: int) -> float:
    """Time of one of ``calls`` runs that were all queued before the first began; the median."""
    run()
    stopwatch = CudaStopwatch()
    return median(stopwatch.time_ns(run, calls)[0] for _ in range(REPEATS))


def host_ns(run: Callable[[], object], *, calls: int = 800) -> float:
    """Time that the host takes for one of ``calls`` runs; the median."""
    for _ in range(20):
        run()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        for _ in range(calls):
            run()
        times.append((time.perf_counter_ns() - began) / calls)
    return median(times)


def save(path: Path, found: dict[str, object]) -> None:
    """Figures, with the machine and the command that they came from."""
    write_json(path, {**describe_machine(shlex.join(["python", *sys.argv])), "figures": found})
