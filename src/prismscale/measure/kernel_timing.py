"""Measures kernels one by one on the device that is here.

Each call runs some times to warm up, then in batches that last long enough to be timed. On a GPU
a batch is queued behind a sleeping kernel, so that the time between its events is the kernels' own
and not that of launching them. Tensors stay the same between calls: those that fit the level-2
cache are read from there, as they often are in a program whose last kernel wrote them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Protocol

import numpy as np
import torch

from prismscale.cost.kernel_measured import KernelTable, MeasuredKernel
from prismscale.cost.kernel_signature import KernelCall, parse_signature
from prismscale.errors import UsageError
from prismscale.measure.kernel_inputs import Runnable, build_call
from prismscale.progress import StageUpdate

WARM_UP = 3
BATCHES = 9
LONGEST_BATCH = 50
BATCH_NS = 2_000_000
"""Approximate duration of a batch of short calls."""
_SLEEP_CYCLES_PER_CALL = 40_000


class Stopwatch(Protocol):
    """Times a batch of calls."""

    def time_ns(self, run: Runnable, calls: int) -> tuple[float, float]:
        """Return device and host time of one run, averaged over ``calls`` runs."""
        ...


class CpuStopwatch:
    """Times calls on the CPU, where host and device are one."""

    def time_ns(self, run: Runnable, calls: int) -> tuple[float, float]:
        """Return the wall time of one run, both as device and as host time."""
        began = time.perf_counter_ns()
        for _ in range(calls):
            run()
        each = (time.perf_counter_ns() - began) / calls
        return each, each


class CudaStopwatch:
    """Times with CUDA events around kernels that are all queued before the first one starts."""

    def time_ns(self, run: Runnable, calls: int) -> tuple[float, float]:
        """Return the time between the events, and the time that issuing took, both for one run."""
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
        progress: called with the number of calls done and their total number.
    """
    stopwatch = CudaStopwatch() if device.type == "cuda" else CpuStopwatch()
    distinct = list(dict.fromkeys(signatures))
    kernels: list[MeasuredKernel] = []
    left_out: dict[str, str] = {}
    for done, signature in enumerate(distinct):
        progress(done, len(distinct))
        try:
            kernels.append(measure(signature, device, stopwatch))
        except Exception as error:
            # Operators raise errors of any type, and one call must not cost all the others.
            left_out[signature] = (str(error).splitlines() or [type(error).__name__])[0]
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
    """Measure one call.

    Raises:
        PrismscaleError: the call cannot be rebuilt, or a call rebuilt from the signature is
            another one.
        RuntimeError: the call does not run (out of memory, values that it refuses). Operators may
            raise other errors, too.
    """
    call = parse_signature(signature)
    run = build_call(call, device)
    with torch.no_grad():
        _check_result(call, run())
        for _ in range(WARM_UP - 1):
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


def _check_result(call: KernelCall, result: object) -> None:
    """Raise if the rebuilt call's result has another shape than the recorded call's.

    Only the first tensor counts: further ones, such as states of random numbers, have other shapes
    on the null device than on GPUs.
    """
    made = next(_tensors(result), None)
    if made is None or not call.outputs or tuple(made.shape) == call.outputs[0].sizes:
        return
    raise UsageError(
        f"{call.name}: its signature does not determine the call: the program's had a result of "
        f"{list(call.outputs[0].sizes)}, one rebuilt from the signature has {list(made.shape)}"
    )


def _tensors(result: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a result in order, as a signature lists them."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _tensors(part)
