"""Steps whose computation is on a device of its own: ``slow_device.py FOLDER [RANK FACTOR]``.

Each rank notes what its steps took. Computation is slept, so that ranks that share a core do not
wait for it; ``RANK``'s takes ``FACTOR`` times as long.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from injured_marker import step_ends

STEPS = 40
BUCKET_S = 0.03
NUMEL = 1 << 18


def main() -> None:
    """Two buckets a step: the first is reduced while the second is computed."""
    folder, *slow = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    bucket_s = BUCKET_S * (float(slow[1]) if slow and rank == int(slow[0]) else 1.0)
    buckets = [torch.ones(NUMEL) for _ in range(2)]
    took: list[float] = []
    for _ in range(STEPS):
        began = time.perf_counter()
        works = []
        for bucket in buckets:
            time.sleep(bucket_s)
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
