"""Steps of which one rank computes more slowly: ``slow_device.py FOLDER [RANK FACTOR]``.

Each rank notes what its steps took. ``RANK`` multiplies ``FACTOR`` times as many matrices, as a
device does in the time of a slow one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from injured_marker import step_ends

STEPS = 40
PRODUCTS = 28
"""Of a bucket, about 30 ms."""
SIZE = 384
NUMEL = 1 << 18


def main() -> None:
    """Two buckets a step: the first is reduced while the second is computed."""
    folder, *slow = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    products = round(PRODUCTS * (float(slow[1]) if slow and rank == int(slow[0]) else 1.0))
    matrix = torch.ones(SIZE, SIZE)
    buckets = [torch.ones(NUMEL) for _ in range(2)]
    took: list[float] = []
    for _ in range(STEPS):
        began = time.perf_counter()
        works = []
        for bucket in buckets:
            for _ in range(products):
                matrix @ matrix
            works.append(dist.all_reduce(bucket, async_op=True))
        for work in works:
            work.wait()
        took.append(time.perf_counter() - began)
        step_ends()
    lines = "".join(f"{seconds}\n" for seconds in took)
    (Path(folder) / f"steps-{rank}").write_text(lines)
    # A rank that ends while another still uses gloo's connections aborts it.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
