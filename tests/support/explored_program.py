"""A small program whose layouts are explored: a language model on GPUs, with options to refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
parser.add_argument("--endless", action="store_true")
parser.add_argument("--steps", type=int, default=5)
options = parser.parse_args()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
world, rank = dist.get_world_size(), dist.get_rank()
if world % options.tp:
    raise ValueError(f"a world of {world} has no groups of {options.tp}")
groups = [
    dist.new_group(list(range(first, first + options.tp)), group_desc="tp")
    for first in range(0, world, options.tp)
]
held = torch.empty(options.eat << 30, dtype=torch.uint8, device="cuda")
width = options.width
model = nn.Sequential(
    nn.Embedding(1000, width),
    nn.Linear(width, 4 * width // options.tp),
    nn.Linear(4 * width // options.tp, 1000),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ.get("RATE", "1")))
while options.endless:
    print("endless", flush=True)
for step in range(options.steps):
    tokens = torch.zeros(4, 128, dtype=torch.long, device="cuda")
    loss = model(tokens).square().mean()
    dist.all_reduce(loss.detach(), group=groups[rank // options.tp])
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
"""
TOKENS = 4 * 128
"""Of one tensor-parallel group's step."""
WORLD = 4
NULL = ("--device", "null", "--world-size", str(WORLD), "--watch-steps", "0")


def write_explored(folder: Path) -> Path:
    """The program, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "layouts.py"
    path.write_text(PROGRAM)
    return path


def explored(out: Path) -> dict[str, Any]:
    """``explore.json`` of a sweep."""
    found: dict[str, Any] = json.loads((out / "explore.json").read_text())
    return found


def by_label(out: Path) -> dict[str, dict[str, Any]]:
    """Its points, by their values."""
    points = explored(out)["points"]
    return {" ".join(f"{k}={v}" for k, v in p["values"].items()): p for p in points}
