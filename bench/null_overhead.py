"""What the null CUDA device costs an op, over a Llama training step.

    python bench/null_overhead.py [--layers 32] [--steps 5] [--json PATH]

The figure that matters is the CPU time of a whole step: Python, autograd, dispatcher and null
device together, all threads. 15 us an op is 1 M ops in 15 s. An op is an operator call that reaches
the device; divided by kernels alone, which views and new tensors are not, the figure is stricter.
CPU time equals wall time on an idle machine; wall time is shown beside it. Steps with and without
recording are interleaved. Every figure is the best of ``--steps``.

Most of that is torch and Python themselves. The same step on CPU tensors of a few elements shows
what they cost on this machine, arithmetic included.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tests_on_path  # noqa: F401
from prismscale.devices.null import runtime
from prismscale.devices.null.gpus import device_spec
from prismscale.validation.rows import Row, finish
from support import op_log


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of a Llama and its batch of one sequence."""

    width: int
    head: int
    kv_heads: int
    hidden: int
    vocabulary: int
    length: int


LLAMA_8B = Sizes(width=4096, head=128, kv_heads=8, hidden=14336, vocabulary=128256, length=8192)
TINY = Sizes(width=64, head=2, kv_heads=8, hidden=8, vocabulary=8, length=2)


class Layer(nn.Module):
    """A Llama decoder layer with rotary positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.head
        width, kv_width = sizes.width, sizes.kv_heads * sizes.head
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, width, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.unflatten(-1, (-1, self.head))

        def rotate(t: torch.Tensor) -> torch.Tensor:
            pairs = torch.view_as_complex(t.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * rotation[:, None]).flatten(-2).type_as(t)

        y = self.attention_norm(x)
        q, k, v = rotate(heads(self.q(y))), rotate(heads(self.k(y))), heads(self.v(y))
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        x = x + self.o(attended.transpose(1, 2).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Embedding, ``layers`` decoder layers, norm and head."""

    def __init__(self, layers: int, sizes: Sizes) -> None:
        super().__init__()
        self.pairs = sizes.head // 2
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        shape = (tokens.shape[1], self.pairs)
        rotation = torch.empty(shape, dtype=torch.complex64, device=tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.head(self.norm(x))


def make_step(layers: int, sizes: Sizes = LLAMA_8B, device: str = "cuda") -> Callable[[], None]:
    """A bf16 training step with clipping and fused AdamW."""
    with torch.device(device):
        model = Llama(layers, sizes).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.zeros(1, sizes.length, dtype=torch.int64, device=device)

    def step() -> None:
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(action: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call by ``clock``."""
    start = clock()
    action()
    return clock() - start


def per_call_us(action: Callable[[], object], calls: int = 20_000) -> float:
    """Microseconds of one call, best of five rounds."""

    def round_() -> None:
        for _ in range(calls // 5):
            action()

    return min(timed(round_, time.process_time) for _ in range(5)) / (calls // 5) * 1e6


def on_cpu(layers: int, steps: int) -> float:
    """CPU seconds of the same step on real tensors of a few elements, by one thread."""
    torch.set_num_threads(1)  # the others would only wait, and their waiting counts as CPU time
    step = make_step(layers, TINY, "cpu")
    step()
    return min(timed(step, time.process_time) for _ in range(steps))


class Calls(TorchDispatchMode):
    """Counts operators that reach the device: kernels, views and new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count, and go on."""
        self.n += 1
        return func(*args, **(kwargs or {}))


def measure(layers: int, steps: int) -> list[Row]:
    """All rows of the table."""
    step = make_step(layers)
    first = timed(step)
    plain, recorded, wall = [], [], []
    op_log.drain_ops()
    for _ in range(steps):
        op_log.record_ops(False)
        plain.append(timed(step, time.process_time))
        wall.append(timed(step))
        op_log.record_ops()
        recorded.append(timed(step, time.process_time))
    launched = len(op_log.drain_ops()) / steps
    with Calls() as calls:
        step()
    op_log.drain_ops()
    left = torch.empty(256, 256, device="cuda")
    small = torch.empty(2, 2)
    with torch.no_grad():
        on = per_call_us(lambda: left.add_(left))
        op_log.record_ops(False)
        off = per_call_us(lambda: left.add_(left))
        cpu = per_call_us(lambda: small.add_(small))
        allocating = per_call_us(lambda: left + left)
    step_us = min(plain) / launched * 1e6
    return [
        Row.told("kernels in a step", launched, "kernels"),
        Row.told("operator calls in a step", calls.n, "calls"),
        Row.told("first step (fills the metadata cache)", first, "s"),
        Row.told("llama step, CPU time", min(plain), "s"),
        Row.at_most("llama step, CPU time per kernel", step_us, 15.0, "us"),
        Row.at_most(
            "llama step, CPU time per operator call", min(plain) / calls.n * 1e6, 15.0, "us"
        ),
        Row.told(
            "the same step on tiny CPU tensors, CPU time per kernel",
            on_cpu(layers, steps) / launched * 1e6,
            "us",
        ),
        Row.told("llama step, wall time per kernel", min(wall) / launched * 1e6, "us"),
        Row.at_most("the same while recording", min(recorded) / launched * 1e6, 17.0, "us"),
        Row.told("add_ on the null device", off, "us"),
        Row.told("add_ of 2x2 on the CPU", cpu, "us"),
        Row.told("add with a new output", allocating, "us"),
        Row.at_most("recording, added to a kernel", max(on - off, 0.0), 2.0, "us"),
    ]


def main() -> int:
    """Measure, print, and fail where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runtime.activate(device_spec("b200"))
    rows = measure(options.layers, options.steps)
    return finish(rows, title="Cost of the null device", json_path=options.json)


if __name__ == "__main__":
    sys.exit(main())
