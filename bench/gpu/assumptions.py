"""What the null device assumes of a GPU and of the host beside it, measured on a GPU.

    python bench/gpu/assumptions.py --json PATH

Memory outside torch's allocator, how many kernels can wait in a stream, what a launch and an
operator take of the host, the least time of a kernel in a stream and in a graph, copies over the
bus, and what cudaMalloc and synchronizing take. Run it alone on the GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import device_ns, host_ns, save

MIB = 1 << 20


def memory() -> dict[str, int]:
    """Bytes in use that torch's allocator does not hold, after each library has started."""

    def outside() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    torch.cuda.init()
    found = {"after cudaMemGetInfo": outside()}
    x = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    x.add_(1)
    found["after a kernel"] = outside()
    x @ x
    found["after a product"] = outside()
    q = torch.randn(1, 8, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    found["after attention"] = outside()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    found["after ncclCommInit of one rank"] = outside()
    dist.all_reduce(x)
    found["after an all-reduce of one rank"] = outside()
    dist.destroy_process_group()
    found["total_memory"] = torch.cuda.get_device_properties(0).total_memory
    found["mem_get_info total"] = torch.cuda.mem_get_info()[1]
    return found


def queue_depth(streams: int = 1) -> list[int]:
    """Launches to a busy stream until one blocks the host, for streams one after the other."""
    x = torch.zeros(1, device="cuda")
    x.add_(1)
    depths = []
    held = [torch.cuda.Stream() for _ in range(streams)]
    torch.cuda.synchronize()
    for place, stream in enumerate(held):
        with torch.cuda.stream(stream):
            # A launch that blocks does so until its stream goes on: the next must sleep longer.
            torch.cuda._sleep((place + 1) * 2_000_000_000)
    for stream in held:
        with torch.cuda.stream(stream):
            depths.append(_until_blocked(x))
    torch.cuda.synchronize()
    return depths


def _until_blocked(x: torch.Tensor, limit: int = 6_000) -> int:
    for count in range(limit):
        began = time.perf_counter()
        x.add_(1)
        if time.perf_counter() - began > 0.05:
            return count
    return limit


def host() -> dict[str, float]:
    """Nanoseconds of the host for one call; kernels are shorter than that or skipped."""
    x = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    f = torch.zeros(64, 64, device="cuda")
    weight = torch.nn.Parameter(torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16))
    linear, norm = torch.nn.Linear(64, 64).cuda().bfloat16(), torch.nn.RMSNorm(64).cuda()
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    with torch.no_grad():
        found = {
            "add_": host_ns(lambda: x.add_(1)),
            "add": host_ns(lambda: x + x),
            "mm": host_ns(lambda: x @ x),
            "empty": host_ns(lambda: torch.empty(64, device="cuda")),
            "view": host_ns(lambda: x.view(4096)),
            "copy f32 to bf16": host_ns(lambda: f.bfloat16()),
            "RMSNorm module": host_ns(lambda: norm(f)),
            "Linear module": host_ns(lambda: linear(x)),
            "event record": host_ns(lambda: event.record()),
            "wait_stream": host_ns(lambda: stream.wait_stream(torch.cuda.current_stream())),
            "zeros": host_ns(lambda: torch.zeros(64, device="cuda")),
            "item": host_ns(lambda: f[0, 0].item(), calls=300),
            "synchronize": host_ns(lambda: torch.cuda.synchronize(), calls=300),
            "python call": host_ns(lambda: None),
        }
    found["linear, forward with autograd"] = host_ns(lambda: F.linear(x, weight))
    found["linear, forward and backward"] = host_ns(
        lambda: torch.autograd.grad(F.linear(x, weight).sum(), weight), calls=300
    )
    return found


def launches() -> dict[str, float]:
    """Nanoseconds of the device from one tiny kernel to the next."""
    x = torch.zeros(1, device="cuda")
    large = torch.zeros(1 << 22, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(500):
            x.add_(1)
    return {
        "queued in a stream, one element": device_ns(lambda: x.add_(1), calls=500),
        "queued in a stream, 4 Mi floats": device_ns(lambda: large.add_(1), calls=200),
        "in a graph, one element": device_ns(graph.replay, calls=4) / 500,
        "two streams by turns, with events": device_ns(_turns(x), calls=100) / 2,
    }


def _turns(x: torch.Tensor) -> Callable[[], None]:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()

    def turn() -> None:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.add_(1)
        main.wait_stream(side)
        x.add_(1)

    return turn


def bus() -> dict[str, float]:
    """Nanoseconds of copies between host and device, by bytes."""
    found = {}
    for n_bytes in (4, 4096, MIB, 64 * MIB, 512 * MIB):
        device = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
        pinned = torch.empty(n_bytes, dtype=torch.uint8).pin_memory()
        pageable = torch.zeros(n_bytes, dtype=torch.uint8)
        calls = 3 if n_bytes > MIB else 20
        for name, run in (
            ("pinned to device", lambda d=device, h=pinned: d.copy_(h, non_blocking=True)),
            ("device to pinned", lambda d=device, h=pinned: h.copy_(d, non_blocking=True)),
        ):
            found[f"{name}, {n_bytes} bytes"] = device_ns(run, calls=calls)
        found[f"pageable to device, {n_bytes} bytes"] = host_ns(
            lambda d=device, h=pageable: d.copy_(h), calls=calls
        )
    return found


def allocations() -> dict[str, float]:
    """Nanoseconds of the host for a segment, from the driver and back."""
    found = {}
    for n_bytes in (2 * MIB, 20 * MIB, 256 * MIB, 2048 * MIB):
        taken, given = [], []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter_ns()
            block = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
            taken.append(time.perf_counter_ns() - began)
            del block
            began = time.perf_counter_ns()
            torch.cuda.empty_cache()
            given.append(time.perf_counter_ns() - began)
        found[f"cudaMalloc, {n_bytes} bytes"] = sorted(taken)[2]
        found[f"cudaFree, {n_bytes} bytes"] = sorted(given)[2]
    return found


PARTS: dict[str, Callable[[], object]] = {
    "memory outside torch, bytes": memory,
    "host, ns": host,
    "tiny kernels, ns": launches,
    "copies, ns": bus,
    "segments, ns": allocations,
    "kernels that wait in one stream": queue_depth,
    "kernels that wait in three streams": lambda: queue_depth(3),
}


def main() -> None:
    """Measure all, print, write; a part that fails is told with its error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, object] = {}
    for name, part in PARTS.items():
        try:
            found[name] = part()
        except (RuntimeError, ValueError) as error:
            found[name] = f"failed: {error}"
        print(name, found[name], flush=True)
    save(options.json, found)


if __name__ == "__main__":
    main()
