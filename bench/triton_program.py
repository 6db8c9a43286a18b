"""DDP around a layer with a Triton kernel of its own, tuned: a program of ``null_matrix.py``."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.nn.parallel import DistributedDataParallel

WIDTH = 1024
STEPS = 8


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=4) for block in (256, 512)], key=["count"]
)
@triton.jit
def square_kernel(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """``target = source ** 2``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < count)
    tl.store(target + at, values * values, mask=at < count)


class Square(torch.autograd.Function):
    """The kernel with its gradient."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Launch the kernel."""
        context.save_for_backward(tensor)
        result = torch.empty_like(tensor)
        count = tensor.numel()
        square_kernel[lambda meta: (triton.cdiv(count, meta["BLOCK"]),)](tensor, result, count)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        """By torch's own ops."""
        (tensor,) = context.saved_tensors
        return 2 * tensor * gradient


class Model(torch.nn.Module):
    """Two layers with the kernel between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.last = torch.nn.Linear(WIDTH, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """One number for each row."""
        return self.last(Square.apply(self.first(batch)))


def main() -> None:
    """Train a little."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    model = DistributedDataParallel(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        batch = torch.randn(64, WIDTH, device=device)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
