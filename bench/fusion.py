"""How much less memory traffic torch.compile's fused kernels make than eager operators.

    python bench/fusion.py

A Llama block (RMSNorm in elementary operators, rotary embeddings, SwiGLU; bfloat16) forward and
backward on the CPU: bytes that elementwise operators, copies and reductions read and write one by
one, and bytes that the kernels of inductor's schedule read and write. Products and attention are
left out on both sides. The ratio is the ``fused`` share in ``prismscale.cost.kernel``; the schedule
for GPUs fuses alike, or a little more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._inductor import config, graph, scheduler
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from prismscale.validation.rows import Row, finish

DIM, HIDDEN, HEADS, LENGTH = 1024, 3584, 8, 512
SEPARATE = ("mm", "bmm", "addmm", "_scaled_dot_product", "flash_attention")
FREE = (
    *("view", "transpose", "expand", "unsqueeze", "squeeze", "detach", "slice", "select", "t"),
    *("as_strided", "permute", "empty_like", "empty", "_unsafe_view", "alias", "view_as_real"),
    *("view_as_complex", "_conj", "_reshape_alias", "split", "new_empty_strided", "empty_strided"),
)


class Norm(nn.Module):
    """RMSNorm of elementary operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """In float32, as torchtitan had it in 2024."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).type_as(x) * self.weight


class Block(nn.Module):
    """Attention and SwiGLU with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.projections = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """One layer of batch 1."""
        inner = self.norms[0](x)
        query, key, value, output = self.projections
        heads = [p(inner).view(1, LENGTH, HEADS, -1) for p in (query, key, value)]
        turned = [_turned(h, angles) for h in heads[:2]] + heads[2:]
        first = [h.transpose(1, 2) for h in turned]
        found = functional.scaled_dot_product_attention(
            first[0], first[1], first[2], is_causal=True
        )
        x = x + output(found.transpose(1, 2).contiguous().view(1, LENGTH, DIM))
        inner = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))


def _turned(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(heads)


class EagerBytes(TorchDispatchMode):
    """Sums what operators read and write."""

    n_bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **(kwargs or {}))
        name = op.__name__.split(".")[0]
        if name not in FREE and not any(part in name for part in SEPARATE):
            self.n_bytes += sum(t.nbytes for t in _tensors((args, found)))
        return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


def eager_bytes() -> int:
    """Forward and backward, one operator after another."""
    with EagerBytes() as mode:
        _step(_block())
    return mode.n_bytes


def fused_bytes() -> int:
    """Forward and backward, as inductor schedules them."""
    sizes: list[int] = []
    generate = graph.GraphLowering.codegen

    def codegen(lowered: graph.GraphLowering) -> Any:
        code = generate(lowered)
        for node in lowered.scheduler.nodes:
            if _counts(node):
                sizes.append(node.get_read_write_buffers_sizes())
        return code

    graph.GraphLowering.codegen = codegen  # type: ignore[method-assign,assignment]
    # A cached graph is not scheduled.
    with config.patch(force_disable_caches=True):
        _step(torch.compile(_block()))
    return sum(sizes)


def _counts(node: Any) -> bool:
    """Kernels that inductor wrote, and elementwise operators that it left to ATen."""
    if isinstance(node, (scheduler.SchedulerNode, scheduler.FusedSchedulerNode)):
        return True
    path = (getattr(node.node, "python_kernel_name", None) or "").split(".")
    name = path[-2] if len(path) > 2 else path[-1]
    return name not in ("", *FREE) and not any(part in name for part in SEPARATE)


def _block() -> nn.Module:
    torch.manual_seed(0)
    return Block().bfloat16()


def _step(block: Callable[..., Any]) -> None:
    x = torch.randn(1, LENGTH, DIM, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.randn(1, LENGTH, 1, DIM // HEADS // 2, dtype=torch.complex64)
    block(x, angles).sum().backward()


def main() -> int:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    eager, fused = eager_bytes(), fused_bytes()
    rows = [
        Row.told("elementwise work of a Llama block, eager", eager / 2**20, "MiB"),
        Row.told("the same in inductor's kernels", fused / 2**20, "MiB"),
        Row.told("fused / eager", fused / eager),
    ]
    return finish(rows, title="Fusion", json_path=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
