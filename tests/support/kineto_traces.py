"""Small Kineto traces with known times: two streams, two ranks, one all-reduce a step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

US = 1000
"""Nanoseconds of a microsecond, the unit of Kineto."""
STEP_US, KERNEL_US, ALL_REDUCE_US, SYNC_TAIL_US = 1000, 200, 100, 10
LAUNCH_US, LATENCY_US = 5, 7


def event(category: str, name: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    """One complete event; times in microseconds."""
    base = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 1}
    return base | {"tid": 1, "args": {}} | more


def launched(
    name: str, correlation: int, at: float, start: float, duration: float, stream: int, **args: Any
) -> list[dict[str, Any]]:
    """A launch and the kernel it launches."""
    told = {"correlation": correlation}
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, LAUNCH_US, args=told),
        event("kernel", name, start, duration, tid=stream, args=told | args | {"stream": stream}),
    ]


def rank_events(late_us: float, all_reduce_start_us: float, steps: int = 2) -> list[dict[str, Any]]:
    """A kernel, an all-reduce on another stream that waits for it, a kernel that waits for that,
    and a synchronization. ``late_us`` delays the first kernel."""
    events: list[dict[str, Any]] = []
    reduced = {
        "Collective name": "allreduce",
        "In msg nelems": 256,
        "Out msg nelems": 256,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1]",
    }
    for step in range(steps):
        t, c = step * STEP_US, 10 * step
        done = all_reduce_start_us + t
        first = t + 10 + LATENCY_US + late_us
        events.append(event("user_annotation", f"ProfilerStep#{step + 3}", t, STEP_US))
        events += launched("gemm", c, t + 10, first, KERNEL_US, 7)
        own_start = first + KERNEL_US + 2
        length = done + ALL_REDUCE_US - own_start
        events += launched(
            "ncclDevKernel_AllReduce", c + 1, t + 20, own_start, length, 9, **reduced
        )
        last = done + ALL_REDUCE_US + 3
        events += launched("adam", c + 2, t + 30, last, KERNEL_US, 7)
        events.append(
            event(
                "cuda_runtime",
                "cudaDeviceSynchronize",
                t + 40,
                last + KERNEL_US + SYNC_TAIL_US - (t + 40),
                args={"correlation": 1000 + c},
            )
        )
    return events


def write(path: Path, events: list[dict[str, Any]], rank: int = 0, world_size: int = 2) -> Path:
    """Write a rank's trace, gzipped where the name says so."""
    document = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "traceEvents": events,
    }
    text = json.dumps(document).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def two_ranks(folder: Path) -> list[Path]:
    """Rank 1 comes 50 µs later; the all-reduce starts when it has come."""
    start = 10 + LATENCY_US + 50 + KERNEL_US + 2
    return [
        write(folder / f"rank{rank}.json.gz", rank_events(late, start), rank)
        for rank, late in ((0, 0.0), (1, 50.0))
    ]
