"""torch's own profiler on the null device: operators have the device time of their kernels.

On a GPU the profiler listens to CUPTI, which wants a driver. Without CUPTI it asks the device
before and after each operator, which ``csrc/profiler.cpp`` answers. So tables of operators have
their times; traces have no kernels: those are in what ``prismscale export`` writes.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch.autograd import profiler

_Activity = torch._C._profiler.ProfilerActivity


def install() -> None:
    """Let the profiler ask the device instead of CUPTI."""
    torch.autograd._supported_activities = lambda: {_Activity.CPU, _Activity.CUDA}
    profiler._supported_activities = lambda: {_Activity.CPU}
    begin = profiler.profile.__init__

    @wraps(begin)
    def begin_with_operators(self: Any, *given: Any, **options: Any) -> None:
        # The device is asked by operator, also where a program wants kernels alone.
        if options.get("use_device") == "cuda":
            options["use_cpu"] = True
        begin(self, *given, **options)

    profiler.profile.__init__ = begin_with_operators  # type: ignore[method-assign]
