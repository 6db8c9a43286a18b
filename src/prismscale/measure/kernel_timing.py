"""Measure kernels one by one on the device that is here.

Each call runs some times to warm up, then in batches that last long enough to be timed. On a GPU
a batch is queued behind a sleeping kernel, so that the time between its events is the kernels' own
and not that of launching them. Tensors stay the same between calls: what fits the level-2 cache is
read from there, as it often is in a program whose last kernel wrote it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

import numpy as np
import torch

from prismscale.cost.kernel_measured import KernelTable, MeasuredKernel
from prismscale.cost.kernel_signature import parse_signature
from prismscale.errors import PrismscaleError
from prismscale.measure.kernel_inputs import Runnable, build_call
from prismscale.progress import StageUpdate

WARM_UP = 3
BATCHES = 9
LONGEST_BATCH = 50
BATCH_NS = 2_000_000
"""A batch of short calls lasts about so long."""
_SLEEP_CYCLES_PER_CALL = 40_000


class Stopwatch(Protocol):
    """Times a batch of calls."""

    def time_ns(self, run: Runnable, calls: int) -> tuple[float, float]:
        """Device and host time of one of ``calls`` runs, on average."""
        ...


class CpuStopwatch:
    """Host and device are one."""

    def time_ns(self, run: Runnable, calls: int) -> tuple[float, float]:
        """Wall time."""
        began = time.perf_counter_ns()
        for _ in range(calls):
            run()
        each = (time.perf_counter_ns() - began) / calls
        return each, each


class CudaStopwatch:
    """CUDA events around kernels that were all queued before the first one starts."""

    def time_ns(self, run: Runnable, calls: int) -> tuple[float, float]:
        """Time between events, and time that issuing took."""
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(_SLEEP_CYCLES_PER_CALL * calls)
        start.record()
        began = time.perf_counter_ns()
        for _ in range(calls):
            run()
        issued = time.perf_counter_ns() - began
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e6 / calls, issued / calls


def profile_kernels(
    signatures: Sequence[str],
    device: torch.device,
    *,
    progress: StageUpdate = lambda done, total: None,
) -> KernelTable:
    """Measure each distinct call; those that cannot be rebuilt or run are listed with the reason.

    Args:
        signatures: texts as the null device writes them; repeated ones are measured once.
        device: where to measure.
        progress: told how many of how many are done.
    """
    stopwatch = CudaStopwatch() if device.type == "cuda" else CpuStopwatch()
    distinct = list(dict.fromkeys(signatures))
    kernels: list[MeasuredKernel] = []
    left_out: dict[str, str] = {}
    for done, signature in enumerate(distinct):
        progress(done, len(distinct))
        try:
            kernels.append(measure(signature, device, stopwatch))
        except (PrismscaleError, RuntimeError, TypeError, ValueError) as error:
            left_out[signature] = str(error).splitlines()[0]
    progress(len(distinct), len(distinct))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return KernelTable(
        device=name,
        torch=torch.__version__,
        date=datetime.now(UTC).date().isoformat(),
        kernels=tuple(kernels),
        left_out=left_out,
    )


def measure(signature: str, device: torch.device, stopwatch: Stopwatch) -> MeasuredKernel:
    """One call.

    Raises:
        PrismscaleError: the call cannot be rebuilt.
        RuntimeError: it does not run (out of memory, values that it refuses).
    """
    run = build_call(parse_signature(signature), device)
    with torch.no_grad():
        for _ in range(WARM_UP):
            run()
        once, _ = stopwatch.time_ns(run, 1)
        calls = max(1, min(LONGEST_BATCH, round(BATCH_NS / max(once, 1.0))))
        times = np.array([stopwatch.time_ns(run, calls) for _ in range(BATCHES)])
    device_ns, host_ns = np.median(times, axis=0)
    low, high = np.quantile(times[:, 0], [0.05, 0.95])
    return MeasuredKernel(
        signature=signature,
        device_ns=round(device_ns),
        host_ns=round(host_ns),
        spread=float((high - low) / 2 / max(device_ns, 1.0)),
    )
