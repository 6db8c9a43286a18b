"""A small job that a fault befalls: ``injured.py FOLDER``.

``FOLDER/fault.json`` says which: ``{"kind": "kill", "rank": R, "step": S}`` ends another rank while
it is suspended (with one slot, all others are); ``{"kind": "flip", "step": S, "byte": K}`` changes
a byte of what another rank has said and nobody has heard yet. Each rank notes what it hears.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from injured_marker import step_ends

FOLDER = Path(sys.argv[1])
STEPS = 9
NUMEL = 4096


def injure(fault: dict[str, object], step: int, rank: int) -> None:
    """Let the fault happen, if this is its moment."""
    if rank != 0 or step != fault.get("step"):
        return
    if fault["kind"] == "kill":
        os.kill(int((FOLDER / f"pid-{fault['rank']}").read_text()), signal.SIGKILL)
    elif fault["kind"] == "flip":
        said = sorted(Path(str(fault["run"])).glob("captures/*/values/*.[1-9]"))
        with said[-1].open("r+b") as file:
            file.seek(-1 - int(str(fault["byte"])), os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0x40]))


def main() -> None:
    """Sum up, step by step."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    (FOLDER / f"pid-{rank}").write_text(str(os.getpid()))
    told = FOLDER / "fault.json"
    fault = json.loads(told.read_text()) if told.exists() else {}
    heard = FOLDER / f"heard-{rank}.jsonl"
    heard.unlink(missing_ok=True)
    everyone: list[object] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank})
    total = torch.arange(NUMEL, dtype=torch.float32) + rank
    for step in range(STEPS):
        if rank == 0:
            # Comes last: the others have said their part, and are suspended.
            dist.barrier()
            injure(fault, step, rank)
            dist.all_reduce(total)
        else:
            dist.barrier()
            dist.all_reduce(total)
        total /= size
        with heard.open("a") as file:
            file.write(json.dumps([step, total.double().sum().item(), len(everyone)]) + "\n")
        step_ends()
    dist.destroy_process_group()


main()
