"""A training loop on FSDP2 that does what people's loops do, as often as asked.

    fsdp_events.py --log-every 10 --eval-every 5 --save-every 4 --save async …

Nothing here knows of prismscale. Rank 0 prints its tokens per second over the steps since the last
line, as trainers do.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

TOKENS, WIDTH = 8192, 2048


class Block(nn.Module):
    """An MLP with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def parse_args() -> argparse.Namespace:
    """How often what is done; 0 is never."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("log", 1), ("eval", 0), ("save", 0), ("lr", 0)):
        parser.add_argument(f"--{name}-every", type=int, default=default)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--save", choices=("sync", "async"), default="sync")
    parser.add_argument("--folder", default="checkpoints")
    parser.add_argument("--profile", action="store_true", help="torch.profiler's own schedule")
    parser.add_argument("--scaler", action="store_true", help="fp16 with a GradScaler")
    return parser.parse_args()


class Loop:
    """One rank's training."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        with torch.device("cuda"):
            blocks = nn.Sequential(*(Block() for _ in range(args.blocks)))
        self.model = blocks if args.scaler else blocks.bfloat16()
        for block in self.model:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler("cuda", enabled=args.scaler)
        self.future: Any = None

    def loss(self) -> torch.Tensor:
        """Of a batch of noise."""
        kind = torch.float16 if self.args.scaler else torch.bfloat16
        batch = torch.randn(TOKENS, WIDTH, device="cuda", dtype=kind)
        with torch.autocast("cuda", dtype=kind, enabled=self.args.scaler):
            return self.model(batch).float().pow(2).mean()

    def train(self) -> None:
        """All steps."""
        args, profiler = self.args, None
        if args.profile:
            plan = torch.profiler.schedule(wait=4, warmup=1, active=2, repeat=1)
            profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], schedule=plan
            )
            profiler.start()
        start = time.perf_counter()
        for step in range(1, args.steps + 1):
            loss = self.loss()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            if args.log_every and step % args.log_every == 0:
                start = self.log(step, loss, start)
            if args.eval_every and step % args.eval_every == 0:
                self.evaluate()
            if args.save_every and step % args.save_every == 0:
                self.save(step)
            if args.lr_every and step % args.lr_every == 0:
                for group in self.optimizer.param_groups:
                    group["lr"] *= 0.9
            if profiler is not None:
                profiler.step()

    def log(self, step: int, loss: torch.Tensor, start: float) -> float:
        """Mean loss of all ranks; returns when the next interval begins."""
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        value = mean.item()
        now = time.perf_counter()
        rate = TOKENS * self.args.log_every / (now - start)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {value:.4f}  tokens/s {rate:.6f}", flush=True)
        return now

    def evaluate(self) -> None:
        """Three batches without gradients."""
        with torch.no_grad():
            total = torch.stack([self.loss() for _ in range(3)]).sum()
        dist.all_reduce(total)
        total.item()

    def save(self, step: int) -> None:
        """Through torch.distributed.checkpoint."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "step": step}
        if self.future is not None:
            self.future.result()
        writer = dcp.FileSystemWriter(os.path.join(self.args.folder, f"step-{step}"))
        if self.args.save == "async":
            self.future = dcp.async_save(state, storage_writer=writer)
        else:
            dcp.save(state, storage_writer=writer)


def main() -> None:
    """Train."""
    args = parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    Loop(args).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
