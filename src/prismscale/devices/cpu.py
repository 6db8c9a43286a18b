"""The CPU as device: spans from the monotonic clock, memory from torch's allocation reports."""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns, time_ns  # by name: a program's ``time`` may be logical
from typing import Any

import torch
from torch._C._profiler import _EventType, _ExperimentalConfig
from torch.autograd import ProfilerActivity, ProfilerConfig, ProfilerState
from torch.autograd import profiler as autograd_profiler

from prismscale.devices.lane_spans import LaneSpans
from prismscale.devices.protocol import CommunicationEnd, LaneObserver, SpanSink
from prismscale.graph.trace import HOST, MemoryRecord


class CpuDevice:
    """A device with one lane, the host. Its marks are ``perf_counter_ns`` readings."""

    name = "cpu"

    def spans(self, stream: SpanSink, label: str) -> LaneSpans:
        """Return spans that lie between two marks each."""
        return LaneSpans(stream, self, label)

    def lane(self) -> str:
        """Return the host lane."""
        return HOST

    def mark(self, lane: str) -> int:
        """Return the present time."""
        return perf_counter_ns()

    def elapsed_ns(self, began: int, ended: int) -> int:
        """Return the difference of two marks."""
        return ended - began

    def communicate(
        self, channel: object, fill: Callable[[], None], *, blocks_host: bool
    ) -> CommunicationEnd:
        """Run ``fill`` at once, so that nothing is left to wait for."""
        fill()
        return _at_once

    def observed(self, observer: LaneObserver) -> AbstractContextManager[None]:
        """Observe nothing: there is no other lane."""
        return nullcontext()


def _at_once() -> None:
    """Wait for nothing: the host has filled the outputs already."""


class CpuMemoryTracker:
    """Tracker of all allocations and frees of torch's CPU allocator from the program's first line.

    Only torch's profiler reports them. It costs about a quarter of a step, so it runs only in the
    first steps, which are not timed. If the program starts a profiler of its own, ours ends first.
    """

    def __init__(self) -> None:
        self._step_ends_ns: list[int] = []
        self._peaks: list[int] = []
        self._running = False
        self._original_prepare: Any = None

    def start(self) -> None:
        """Begin to record allocations."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._original_prepare = autograd_profiler._prepare_profiler

        def give_way(*args: Any, **kwargs: Any) -> Any:
            self._end_profile()
            return self._original_prepare(*args, **kwargs)

        config = ProfilerConfig(
            ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig(), ""
        )
        activities = {ProfilerActivity.CPU}
        torch.autograd._prepare_profiler(config, activities)
        torch.autograd._enable_profiler(config, activities)
        self._running = True
        autograd_profiler._prepare_profiler = give_way

    def optimizer_begins(self) -> None:
        """Do nothing."""

    def step_ended(self) -> None:
        """Note the end of a step.

        One profile covers all steps: a free by another thread between two profiles would be lost,
        and its block would count as allocated for ever.
        """
        self._step_ends_ns.append(time_ns())

    def stop(self) -> MemoryRecord:
        """End tracking. Step 0 of the record is the part before the first step's end."""
        if self._running:
            self._end_profile()
        autograd_profiler._prepare_profiler = self._original_prepare
        peaks = self._peaks or [0]
        return MemoryRecord(
            peak_bytes=max(peaks),
            peak_step=peaks.index(max(peaks)),
            step_peak_bytes=tuple(peaks),
        )

    def _end_profile(self) -> None:
        if not self._running:
            return
        self._running = False
        result: Any = torch.autograd._disable_profiler()
        ends = [*self._step_ends_ns, sys.maxsize]
        blocks, peak, step = LiveBlocks(), 0, 0
        for at_ns, address, n_bytes in allocations(result.experimental_event_tree()):
            while at_ns > ends[step]:
                self._peaks.append(peak)
                peak, step = blocks.allocated, step + 1
            blocks.change(address, n_bytes)
            peak = max(peak, blocks.allocated)
        self._peaks += [peak] + [blocks.allocated] * (len(self._step_ends_ns) - step - 1)


def allocations(roots: Iterable[Any]) -> list[tuple[int, int, int]]:
    """Return time, address and bytes (negative: a free) of a profile's memory events.

    They are sorted by time, because the profiler keeps them thread by thread, and gloo's threads
    allocate too.
    """
    found = []
    left = list(roots)
    while left:
        event = left.pop()
        left.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return sorted(found)


class LiveBlocks:
    """Allocated memory by address.

    [Note: lost frees] The profiler does not see frees by threads that it does not follow (gloo's
    own), and such a block would count for ever. But when an address is allocated again, the old
    block there must have been freed.
    """

    def __init__(self) -> None:
        self.allocated = 0
        self._starts: list[int] = []
        self._bytes: dict[int, int] = {}

    def change(self, address: int, n_bytes: int) -> None:
        """Note an allocation, or a free if ``n_bytes`` is negative."""
        if n_bytes < 0:
            if address in self._bytes:
                self._forget(bisect_left(self._starts, address))
            else:  # allocated before tracking began
                self.allocated += n_bytes
            return
        at = max(bisect_left(self._starts, address) - 1, 0)
        while at < len(self._starts) and self._starts[at] < address + n_bytes:
            start = self._starts[at]
            if start == address or start + self._bytes[start] > address:
                self._forget(at)
            else:
                at += 1
        self._starts.insert(bisect_left(self._starts, address), address)
        self._bytes[address] = n_bytes
        self.allocated += n_bytes

    def _forget(self, at: int) -> None:
        self.allocated -= self._bytes.pop(self._starts.pop(at))
