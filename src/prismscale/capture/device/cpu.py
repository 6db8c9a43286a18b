"""The CPU as the device: spans by the monotonic clock, memory by torch's own allocation reports."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.autograd import ProfilerActivity, ProfilerConfig, ProfilerState
from torch.autograd import profiler as autograd_profiler
from torch._C._profiler import _ExperimentalConfig

from prismscale.graph.trace import MemoryRecord


class CpuDevice:
    """Marks are ``perf_counter_ns`` readings."""

    name = "cpu"

    def mark(self) -> int:
        """Now."""
        return time.perf_counter_ns()

    def elapsed_ns(self, began: int, ended: int) -> int:
        """Their difference."""
        return ended - began


class CpuMemoryTracker:
    """Every allocation and free of torch's CPU allocator, from the program's first line.

    The profiler is the only place where torch reports them. It costs about a quarter of a step, so
    it runs only in the first steps, which are not timed. A program that starts a profiler of its
    own gets it: ours ends first.
    """

    def __init__(self) -> None:
        self._allocated = 0
        self._peaks: list[int] = []
        self._running = False
        self._original_prepare: Any = None

    def start(self) -> None:
        """Begin to follow allocations."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._original_prepare = autograd_profiler._prepare_profiler

        def give_way(*args: Any) -> Any:
            self._end_profile()
            return self._original_prepare(*args)

        self._begin_profile()
        autograd_profiler._prepare_profiler = give_way  # type: ignore[assignment]

    def step_ended(self) -> None:
        """Close a step's peak and go on."""
        if self._running:
            self._end_profile()
            self._begin_profile()

    def stop(self) -> MemoryRecord:
        """End; ``peak_step`` counts from -1, the part before the first step's end being step 0."""
        if self._running:
            self._end_profile()
        autograd_profiler._prepare_profiler = self._original_prepare
        peaks = self._peaks or [0]
        return MemoryRecord(
            peak_bytes=max(peaks),
            peak_step=peaks.index(max(peaks)),
            step_peak_bytes=tuple(peaks),
        )

    def _begin_profile(self) -> None:
        config = ProfilerConfig(
            ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig(), ""
        )
        activities = {ProfilerActivity.CPU}
        torch.autograd._prepare_profiler(config, activities)  # type: ignore[attr-defined]
        torch.autograd._enable_profiler(config, activities)  # type: ignore[attr-defined]
        self._running = True

    def _end_profile(self) -> None:
        if not self._running:
            return
        self._running = False
        result = torch.autograd._disable_profiler()  # type: ignore[attr-defined]
        peak = self._allocated
        for event in result.events():
            if event.name() == "[memory]":
                self._allocated += event.nbytes()
                peak = max(peak, self._allocated)
        self._peaks.append(peak)
