"""A training program whose branches depend on what all ranks hear from each other.

    torchrun … bench/programs/branching.py FOLDER

Sequences are as long as the longest that any rank drew; tokens go to experts on other ranks, as
many as a gate says; steps with a large gradient norm are skipped; the loss scale falls where any
rank overflows, and rises later; training stops early when the mean loss no longer falls.
``FOLDER/branches-R.jsonl`` gets a line a step: what was decided.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 16
MOST_STEPS = 60
LARGEST_NORM = 0.6
HARD = {3: 30.0, 5: 6.0}
"""Factors on gradients, by the number of the step modulo 7."""
OVERFLOW = 512.0
"""Of a scaled gradient, as if it were a half's."""
PATIENCE = 2
WARM_UP = 14
FALLS_BY = 0.03


class Rank:
    """One rank of the job."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.gate = nn.Linear(WIDTH, self.size)
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        torch.manual_seed(1 + self.rank)
        self.expert = nn.Linear(WIDTH, WIDTH)
        shared = [*self.gate.parameters(), *self.trunk.parameters()]
        self.shared = shared
        self.optimizer = torch.optim.SGD([*shared, *self.expert.parameters()], lr=0.2)
        self.draws = torch.Generator().manual_seed(100 + self.rank)
        self.scale, self.calm, self.best, self.worse = 4096.0, 0, float("inf"), 0

    def step(self, number: int) -> dict[str, object]:
        """One step; says what was decided."""
        length = self._length()
        tokens = torch.randn(length, WIDTH, generator=self.draws)
        splits, mine = self._dispatched(tokens)
        loss = (self.trunk(tokens) + tokens).square().mean()
        loss = loss + (self.expert(mine) - mine).square().mean() + self.gate(tokens).std() * 0.1
        (loss * self.scale).backward()
        # Batches that one rank alone finds hard: its gradients overflow, or are large.
        if self.rank == number % self.size and number % 7 in HARD:
            for parameter in self.shared:
                parameter.grad *= HARD[number % 7]
        overflows = self._overflows()
        norm = self._reduced_norm()
        skips = overflows or norm > LARGEST_NORM
        if not skips:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "length": length,
            "splits": splits,
            "scale": self._rescaled(overflows),
            "skips": skips,
            "stops": self._stops(loss.detach()) and number >= WARM_UP,
        }

    def _length(self) -> int:
        longest = torch.randint(5, 40, (1,), generator=self.draws)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return int(longest)

    def _dispatched(self, tokens: Tensor) -> tuple[list[int], Tensor]:
        """How many tokens go to each rank, and those that come to this one."""
        experts = self.gate(tokens).argmax(1)
        order = experts.argsort(stable=True)
        given = torch.bincount(experts, minlength=self.size)
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given)
        mine = torch.empty(int(taken.sum()), WIDTH)
        dist.all_to_all_single(mine, tokens[order], taken.tolist(), given.tolist())
        # One token of its own, so that an expert that nobody chose has a loss.
        return given.tolist(), torch.cat([mine, tokens[:1]])

    def _overflows(self) -> bool:
        largest = max(float(p.grad.abs().max()) for p in self.shared if p.grad is not None)
        found = torch.tensor([float(largest > OVERFLOW)])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def _reduced_norm(self) -> float:
        """Gradients are averaged and unscaled; the norm is that of all ranks."""
        for parameter in self.shared:
            grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            dist.all_reduce(grad, dist.ReduceOp.AVG)
            parameter.grad = grad / self.scale
        for parameter in self.expert.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.scale
        total = torch.stack([p.grad.square().sum() for p in self.shared]).sum()
        dist.all_reduce(total)
        return float((total / self.size).sqrt())

    def _rescaled(self, overflows: bool) -> float:
        self.calm = 0 if overflows else self.calm + 1
        self.scale *= 0.5 if overflows else (2.0 if self.calm % 5 == 0 else 1.0)
        return self.scale

    def _stops(self, loss: Tensor) -> bool:
        dist.all_reduce(loss)
        mean = float(loss) / self.size
        self.worse = 0 if mean < self.best - FALLS_BY else self.worse + 1
        self.best = min(self.best, mean)
        return self.worse >= PATIENCE


def main() -> None:
    """Train until it is time to stop."""
    path = Path(sys.argv[1]) / f"branches-{os.environ['RANK']}.jsonl"
    path.unlink(missing_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank()
    for number in range(MOST_STEPS):
        told = rank.step(number)
        with path.open("a") as file:
            file.write(json.dumps(told) + "\n")
        if told["stops"]:
            break
    dist.destroy_process_group()


main()
