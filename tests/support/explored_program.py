"""A small program whose layouts are explored: a language model on GPUs, with options to refuse."""

from __future__ import annotations

from pathlib import Path

PROGRAM = """
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--eat", type=int, default=0, help="GiB")
parser.add_argument("--twice", action="store_true")
options = parser.parse_args()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
world = dist.get_world_size()
if world % options.tp:
    raise ValueError(f"a world of {world} has no tensor-parallel groups of {options.tp}")
mine = dist.get_rank() // options.tp
for first in range(0, world, options.tp):
    group = dist.new_group(list(range(first, first + options.tp)), group_desc="tp")
    tp = group if first // options.tp == mine else None or (tp if first else None)
held = torch.empty(options.eat << 30, dtype=torch.uint8, device="cuda")
torch.manual_seed(0)
width = options.width
model = nn.Sequential(
    nn.Embedding(1000, width),
    nn.Linear(width, 4 * width // options.tp),
    nn.Linear(4 * width // options.tp, 1000),
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=float(os.environ.get("RATE", "1e-3")))
for step in range(6):
    for _ in range(2 if options.twice else 1):
        tokens = torch.zeros(4, 128, dtype=torch.long, device="cuda")
        loss = model(tokens).square().mean()
        dist.all_reduce(loss.detach(), group=tp)
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
"""
TOKENS = 4 * 128
"""Of one rank's step."""


def write_explored(folder: Path) -> Path:
    """The program, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "layouts.py"
    path.write_text(PROGRAM)
    return path
