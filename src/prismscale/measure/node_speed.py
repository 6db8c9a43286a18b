"""Checks the health of this node: how long its devices take for the same work, over and over.

The work is one matrix product that keeps a device busy. The median of many runs counts, because a
single run says more about what else the machine does. ``prismscale place --nodes`` compares nodes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from prismscale.errors import UsageError

SIZE = {"cpu": 1024, "cuda": 8192}
WARM_UP, RUNS = 5, 30
DEVICES = ("cpu", "cuda")


def local_devices(device: str) -> tuple[int, ...]:
    """Return the cores that this process may use, or the GPUs that torch sees, by number."""
    if device == "cuda":
        return tuple(range(torch.cuda.device_count()))
    return tuple(sorted(os.sched_getaffinity(0)))


def check_seconds(device: str) -> float:
    """Return the median seconds of one matrix product on the slowest device of this node.

    Args:
        device: ``cpu`` (fp32) or ``cuda`` (bf16, every visible GPU).

    Raises:
        UsageError: ``device`` is neither of these, or torch sees no GPU.
    """
    if device not in DEVICES:
        raise UsageError(f"--device {device}: allowed are {', '.join(DEVICES)}")
    if device == "cpu":
        return _median_seconds(torch.device("cpu"), lambda: None)
    if not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; use --device cpu")
    found = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.device("cuda", index)
        found.append(_median_seconds(gpu, partial(torch.cuda.synchronize, gpu)))
    return max(found)


def _median_seconds(device: torch.device, wait: Callable[[], None]) -> float:
    n = SIZE[device.type]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    took = []
    for _ in range(WARM_UP + RUNS):
        wait()
        began = time.perf_counter()
        torch.mm(a, b)
        wait()
        took.append(time.perf_counter() - began)
    return float(np.median(took[WARM_UP:]))
