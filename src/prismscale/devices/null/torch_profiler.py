"""torch's own profiler on the null device: operators have the device time of their kernels.

On a GPU the profiler uses CUPTI, which needs a driver. Without CUPTI it asks the device for its
time before and after each operator; ``csrc/profiler.cpp`` answers. So tables of operators have
device times. Traces have no kernels; these are in the files that ``prismscale export`` writes.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch.autograd import profiler

_Activity = torch._C._profiler.ProfilerActivity


def install() -> None:
    """Make the profiler ask the device instead of CUPTI."""
    torch.autograd._supported_activities = lambda: {_Activity.CPU, _Activity.CUDA}
    profiler._supported_activities = lambda: {_Activity.CPU}
    begin = profiler.profile.__init__

    @wraps(begin)
    def begin_with_operators(self: Any, *given: Any, **options: Any) -> None:
        # The device is asked at each operator, so operators are needed even for kernels alone.
        if options.get("use_device") == "cuda":
            options["use_cpu"] = True
        begin(self, *given, **options)

    profiler.profile.__init__ = begin_with_operators  # type: ignore[method-assign]
