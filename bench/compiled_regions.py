"""torch.compile on the null device beside inductor's own schedule.

    python bench/compiled_regions.py [--json PATH]

A Llama block and a mixture of experts, bfloat16, forward and backward, compiled with the default
options. For each: how many kernels inductor schedules and how many are launched, the bytes that its
scheduler expects them to move and those that they are charged with, and the CPU time until the
first step has run, without anything in the caches and with what another process left there (as the
second rank of a job finds it). Each figure comes from a process of its own. Needs Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import tests_on_path  # noqa: F401
from fusion import DIM, HEADS, LENGTH, Block
from prismscale.validation.rows import Row, finish

EXPERTS, TOP, WIDTH = 8, 2, 1024
MOST_CPU_S = 10


class Experts(nn.Module):
    """SwiGLU experts: tokens sorted by expert, three grouped products, and the results added up."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(EXPERTS, DIM, WIDTH)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, DIM))

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """With the residual; the angles are a Llama block's."""
        tokens = x.view(-1, DIM)
        scores, experts = self.router(tokens).float().softmax(-1).topk(TOP)
        order = experts.view(-1).argsort(stable=True)
        counts = functional.one_hot(experts.view(-1), EXPERTS).sum(0)
        ends = torch.cumsum(counts, 0).to(torch.int32)
        sent = tokens[order // TOP] * scores.view(-1)[order, None].to(x.dtype)
        gate, up = (torch._grouped_mm(sent, w, offs=ends) for w in (self.gate, self.up))
        found = torch._grouped_mm(functional.silu(gate) * up, self.down, offs=ends)
        return (tokens + torch.zeros_like(tokens).index_add(0, order // TOP, found)).view_as(x)


MODULES: dict[str, Callable[[], nn.Module]] = {"Llama block": Block, "experts": Experts}


def compile_here(name: str, *, with_schedule: bool) -> dict[str, float]:
    """Compile a module and run a step; what was scheduled, launched, and how long it took."""
    from prismscale.devices.null.gpus import device_spec
    from prismscale.devices.null.runtime import activate

    activate(device_spec("h100-sxm"))
    from support import op_log
    from support.inductor_schedule import scheduled_kernels

    module = MODULES[name]().bfloat16().to("cuda")
    x = torch.randn(1, LENGTH, DIM, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    shape = (1, LENGTH, 1, DIM // HEADS // 2)
    angles = torch.randn(*shape, dtype=torch.complex64, device="cuda")
    compiled = torch.compile(module)
    if not with_schedule:
        began = time.process_time()
        compiled(x, angles).sum().backward()
        return {"cpu_s": time.process_time() - began}
    op_log.record_ops()
    with scheduled_kernels() as scheduled:
        compiled(x, angles).sum().backward()
    op_log.record_ops(False)
    launched = [
        op.signature.arguments["traffic_bytes"][0]
        for op in op_log.drain_ops()
        if op.signature.name.startswith("inductor::")
    ]
    return {
        "scheduled": len(scheduled),
        "launched": len(launched),
        "scheduled_bytes": sum(kernel.n_bytes for kernel in scheduled),
        "launched_bytes": sum(launched),
    }


def compile_apart(name: str, cache: str, *, with_schedule: bool = False) -> dict[str, Any]:
    """:func:`compile_here` in another process, whose caches lie in ``cache``."""
    command = [sys.executable, __file__, "--compile", name]
    if with_schedule:
        command.append("--schedule")
    done = subprocess.run(
        command,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(name: str) -> list[Row]:
    """The figures of one module."""
    with tempfile.TemporaryDirectory() as cache:
        first, second = (compile_apart(name, cache)["cpu_s"] for _ in range(2))
        found = compile_apart(name, cache, with_schedule=True)
    off = abs(found["launched_bytes"] / found["scheduled_bytes"] - 1)
    return [
        Row.told(f"{name}: kernels that inductor generates", found["scheduled"]),
        Row.at_most(
            f"{name}: launches more or less", abs(found["launched"] - found["scheduled"]), 0
        ),
        Row.told(f"{name}: bytes of its schedule", found["scheduled_bytes"] / 2**20, "MiB"),
        Row.at_most(f"{name}: bytes that are charged, off by", off, 0.05),
        Row.told(f"{name}: CPU time of the first compile", first, "s"),
        Row.at_most(f"{name}: CPU time of the next rank's", second, MOST_CPU_S, "s"),
    ]


def main() -> int:
    """Print the table, and write it where asked; or (``--compile``) be one of its processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", choices=list(MODULES), help=argparse.SUPPRESS)
    parser.add_argument("--schedule", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        print(json.dumps(compile_here(options.compile, with_schedule=options.schedule)))
        return 0
    rows = [row for name in MODULES for row in rows_of(name)]
    return finish(rows, title="Compiled regions", json_path=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
