"""Train a Llama-style decoder on synthetic tokens, with torch-native parallelism.

    torchrun --nproc-per-node 8 examples/llama/train.py --model debug --tp 2 --pp 2

The ranks form a mesh (pp, dp, tp), and experts are spread over parts of dp. Options:
`examples/llama/train.py --help`.
"""

from __future__ import annotations

import gc
import os
import time

import torch
import torch.distributed as dist
from config import TrainConfig, parse_args
from data import batches
from parallel import (
    Axes,
    GradientAccumulation,
    build_loss,
    build_mesh,
    clip_grad_norm,
    loss_context,
    split_experts,
)
from pipeline import Pipeline
from torch import Tensor


def init_device(device_type: str | None) -> torch.device:
    """This rank's device, with the default process group on the backend that fits it."""
    if device_type == "cpu" or not (device_type or torch.cuda.is_available()):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


class Trainer:
    """One rank's part of the job."""

    def __init__(self, config: TrainConfig, mesh: Axes, device: torch.device) -> None:
        self.config, self.mesh, self.device = config, mesh, device
        runner = Pipeline if config.layout.pp > 1 else GradientAccumulation
        self.runner = runner(config, mesh, device, build_loss(mesh))
        self.parameter_groups = split_experts(self.runner.parts)
        groups = [{"params": parameters} for parameters in self.parameter_groups if parameters]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, fused=True)
        self.prints = dist.get_rank() == config.printing_rank

    def train(self) -> None:
        """Run all steps."""
        data = batches(self.config, self.mesh["dp"].get_local_rank())
        for step, (tokens, labels) in enumerate(data, start=1):
            start = time.perf_counter()
            loss, grad_norm = self.train_step(tokens.to(self.device), labels.to(self.device))
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            if step % self.config.log_every == 0:
                self.log_step(step, seconds, loss, grad_norm)
        if self.prints and self.device.type == "cuda":
            peak_gib = torch.cuda.max_memory_allocated() / 2**30
            print(f"peak memory {peak_gib:.2f} GiB on rank {dist.get_rank()}", flush=True)

    def train_step(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """One optimizer step; returns this rank's loss and the gradient norm, if it has them."""
        with loss_context(self.config.layout):
            loss = self.runner.forward_backward(tokens, labels)
        grad_norm = None
        if self.config.clip_grad > 0:
            grad_norm = clip_grad_norm(self.parameter_groups, self.config.clip_grad, self.mesh)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, grad_norm

    def log_step(
        self, step: int, seconds: float, loss: Tensor | None, grad_norm: Tensor | None
    ) -> None:
        """Print one line on the printing rank; the loss is the mean over dp."""
        dp = self.config.layout.dp
        if loss is not None and dp > 1:
            dist.all_reduce(loss, group=self.mesh["dp"].get_group())
            loss /= dp
        if not self.prints:
            return
        fields = [
            f"step {step:4d}",
            "loss        -" if loss is None else f"loss {loss.item():.6f}",
            f"{self.config.tokens_per_step / seconds:,.0f} tokens/s",
            f"{seconds:.4f} s",
        ]
        if grad_norm is not None:
            fields.append(f"grad norm {grad_norm.item():.6f}")
        print("  ".join(fields), flush=True)


def main() -> None:
    """Parse the command line, train, and leave the process group."""
    config = parse_args()
    device = init_device(config.device)
    mesh = build_mesh(config.layout, device.type)
    Trainer(config, mesh, device).train()
    dist.destroy_process_group()
    # FSDP's process groups are in cycles; gloo's threads must end before Python does.
    gc.collect()


if __name__ == "__main__":
    main()
