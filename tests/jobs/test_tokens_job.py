"""How many tokens a step trains on, read off a program's launches."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs import prismscale, results, write_program

WORLD = 4
LOOKED_UP = 3 * 2 * 128
"""Microbatches, rows and length: what each rank of PROGRAM reads in a step."""
PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn

further = int(sys.argv[1])
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
words = nn.Embedding(4096, 256).cuda()
main = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).cuda()
heads = nn.ModuleList([nn.Linear(256, 256) for _ in range(further)]).cuda()
parameters = [*words.parameters(), *main.parameters(), *heads.parameters()]
optimizer = torch.optim.SGD(parameters)
for step in range(9):
    for _ in range(3):
        tokens = torch.randint(4096, (2, 128), device="cuda")
        hidden = main(words(tokens))
        loss = hidden.sum()
        for head in heads:
            hidden = head(hidden + words(tokens.roll(-1, 1)))
            loss = loss + hidden.sum()
        loss.backward()
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("further", [0, 2])
def test_tokens_count_once_however_many_are_predicted(further: int, tmp_path: Path) -> None:
    """Layers that predict further tokens (MTP) look the same ones up again."""
    script = write_program(tmp_path / "program", PROGRAM)
    job = ("--device", "null", "--world-size", WORLD, "--out", tmp_path / "run", "--samples", 1)
    done = prismscale("run", *job, script, further)
    assert done.code == 0, done.err
    assert results(tmp_path / "run")["work"]["tokens"] == WORLD * LOOKED_UP
