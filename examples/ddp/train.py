"""The smallest data-parallel trainer: one MLP, DistributedDataParallel, AdamW.

torchrun --nproc-per-node 2 examples/ddp/train.py --steps 20
"""

from __future__ import annotations

import argparse
import gc
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an MLP with DistributedDataParallel.")
    parser.add_argument("--hidden", type=int, default=256, help="width of the hidden layers")
    parser.add_argument("--layers", type=int, default=4, help="number of hidden layers")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=1, help="steps from line to line")
    return parser.parse_args()


def build_mlp(hidden: int, layers: int) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(hidden, hidden), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(hidden, hidden))


def train(args: argparse.Namespace, device: torch.device) -> None:
    """All steps; rank 0 prints a line for each."""
    cuda = device.type == "cuda"
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(build_mlp(args.hidden, args.layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Each rank draws its own samples of one common task: restore the negated input.
    samples = torch.Generator().manual_seed(args.seed * dist.get_world_size() + rank)
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        inputs = torch.randn(args.batch_size, args.hidden, generator=samples).to(device)
        loss = mse_loss(model(inputs), -inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if step % args.log_every:
            continue
        if cuda:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / args.log_every
        if rank == 0:
            print(f"step {step:4d}  loss {loss.item():.6f}  {seconds:.4f} s", flush=True)
        start = time.perf_counter()


def main() -> None:
    args = parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    train(args, device)
    dist.destroy_process_group()
    # DDP and its process group are in a cycle; gloo's threads must end before Python does.
    gc.collect()


if __name__ == "__main__":
    main()
