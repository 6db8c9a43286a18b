"""The extension's allocator by itself, and random programs for it and the plain models."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st

from prismscale.devices.null import runtime
from prismscale.devices.null.gpus import NullDeviceSpec
from prismscale.devices.null.memory import memory_stats
from prismscale.devices.null.memory.allocator_config import AllocatorConfig
from prismscale.devices.null.memory.device_settings import settings_row
from support.allocator import METRICS, POOLS, CachingAllocator, OutOfMemory

MIB = 1 << 20
SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 3 * MIB),
    st.integers(8 * MIB, 12 * MIB),
    st.integers(1, 90 * MIB),
)
CONFIGS = st.sampled_from(
    [
        AllocatorConfig(),
        AllocatorConfig(max_split_bytes=40 * MIB),
        AllocatorConfig(roundup_power2_divisions=(4,) * 16),
        AllocatorConfig(memory_fraction=0.7),
        AllocatorConfig(graph_capture_record_stream_reuse=True),
    ]
)


class CppAllocator:
    """The extension's allocator by itself, with the Python model's methods."""

    def __init__(self, total_bytes: int, config: AllocatorConfig) -> None:
        spec = NullDeviceSpec(
            name="test",
            total_memory_bytes=total_bytes,
            multi_processor_count=1,
            capability=(9, 0),
            context_bytes=0,
        )
        self.library = runtime.active().library
        row = settings_row(spec, config)
        self.handle = self.library.ps_replay_new(ctypes.byref(row))

    def work(self, stream: int) -> None:
        self.library.ps_replay_captured_work(self.handle, stream)

    def wait(self, stream: int, other: int) -> None:
        self.library.ps_replay_captured_wait(self.handle, stream, other)

    def malloc(self, size: int, stream: int) -> int:
        block = self.library.ps_replay_malloc(self.handle, size, stream)
        if block is None:
            raise OutOfMemory("out of memory")
        return int(block)

    def free(self, block: int) -> None:
        self.library.ps_replay_free(self.handle, block)

    def record_stream(self, block: int, stream: int) -> None:
        self.library.ps_replay_record_stream(self.handle, block, stream)

    def synchronize(self) -> None:
        self.library.ps_replay_synchronize(self.handle)

    def empty_cache(self) -> None:
        self.library.ps_replay_empty_cache(self.handle, 0)

    def stats(self) -> dict[str, dict[str, dict[str, int]]]:
        words = (ctypes.c_int64 * self.library.ps_stats_words())()
        self.library.ps_replay_stats(self.handle, words)
        return memory_stats.nested_stats(list(words))

    def close(self) -> None:
        self.library.ps_replay_delete(self.handle)

    def begin_pool(self, pool: int, stream: int) -> bool:
        return bool(self.library.ps_replay_begin_pool(self.handle, pool, stream))

    def end_pool(self, pool: int) -> bool:
        return bool(self.library.ps_replay_end_pool(self.handle, pool))

    def release_pool(self, pool: int) -> bool:
        return bool(self.library.ps_replay_release_pool(self.handle, pool))


def replay(
    allocator: Any, steps: Iterable[tuple[str, int, int]], address: Callable[[Any], Any]
) -> list[Any]:
    """Of every step that can be refused: an address, "oom", or whether the pool was fit for it."""
    live: list[Any] = []
    seen: list[Any] = []
    open_pools: set[int] = set()
    for kind, number, stream in steps:
        if kind == "malloc":
            try:
                live.append(allocator.malloc(number, stream))
                seen.append(address(live[-1]))
            except OutOfMemory:
                seen.append("oom")
        elif kind == "free" and live:
            allocator.free(live.pop(number % len(live)))
        elif kind == "use" and live:
            allocator.record_stream(live[number % len(live)], stream)
        elif kind == "work":
            allocator.work(stream)
        elif kind == "wait":
            allocator.wait(stream, number)
        elif kind == "begin":
            seen.append(allocator.begin_pool(number, stream))
            open_pools |= {number} if seen[-1] else set()
        elif kind == "end":
            seen.append(allocator.end_pool(number))
            open_pools.discard(number)
        elif kind == "release" and number not in open_pools:  # a graph outlives its own capture
            seen.append(allocator.release_pool(number))
        elif kind == "synchronize":
            allocator.synchronize()
        elif kind == "empty":
            allocator.empty_cache()
    return seen


def assert_same_statistics(
    stats: dict[str, dict[str, dict[str, int]]], python: CachingAllocator
) -> None:
    """Every metric of every pool, now and at its peak."""
    for metric in METRICS:
        for pool in POOLS:
            stat = python.stats[metric][pool]
            assert stats[metric][pool]["current"] == stat.current, (metric, pool)
            assert stats[metric][pool]["peak"] == stat.peak, (metric, pool)
