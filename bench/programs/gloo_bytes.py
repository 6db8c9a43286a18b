"""Counts what gloo moves over loopback in each collective, for all members together.

    python bench/programs/gloo_bytes.py SIZE NUMEL OUT

In a network namespace of its own, where nobody else's bytes are counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

REPEATS = 4
# torch 2.13 renamed these and warns about the names that 2.11 and 2.12 have.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _moved_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def _calls(rank: int, size: int, numel: int) -> dict[str, Callable[[], object]]:
    part = numel // size

    def parts() -> list[torch.Tensor]:
        return [torch.ones(part) for _ in range(size)]

    return {
        "all_reduce": lambda: dist.all_reduce(torch.ones(numel)),
        "reduce": lambda: dist.reduce(torch.ones(numel), 0),
        "broadcast": lambda: dist.broadcast(torch.ones(numel), 0),
        "all_gather": lambda: all_gather(torch.ones(numel), torch.ones(part)),
        "reduce_scatter": lambda: reduce_scatter(torch.ones(part), torch.ones(numel)),
        "all_to_all": lambda: dist.all_to_all_single(torch.ones(numel), torch.ones(numel)),
        "gather": lambda: dist.gather(torch.ones(part), parts() if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(torch.ones(part), parts() if rank == 0 else None, 0),
    }


def count(rank: int, size: int, numel: int, out: str) -> None:
    """One member."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    found = {}
    for name, call in _calls(rank, size, numel).items():
        call()
        dist.barrier()
        time.sleep(0.1)
        before = _moved_bytes()
        dist.barrier()
        for _ in range(REPEATS):
            call()
        dist.barrier()
        time.sleep(0.1)
        found[name] = (_moved_bytes() - before) / REPEATS
        dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    mp.spawn(count, args=(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]), nprocs=int(sys.argv[1]))
