"""Programs that call torch.compile run on the null device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from support import op_log


def train_step(model: nn.Module) -> list[str]:
    """One step; returns its ops by name."""
    op_log.drain_ops()
    op_log.record_ops()
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    op_log.record_ops(False)
    return [op.signature.name for op in op_log.drain_ops()]


def layers() -> nn.Module:
    """A product between two activations."""
    return nn.Sequential(nn.SiLU(), nn.Linear(64, 64), nn.GELU()).to("cuda")


@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager"])
def test_compiled_modules_run_their_operators(backend: str) -> None:
    """The same ops as without, whatever the backend."""
    plain = train_step(layers())
    compiled = layers()
    compiled.compile(backend=backend, fullgraph=True)

    assert train_step(compiled) == plain


def test_compiled_functions_run() -> None:
    """Also with options of inductor, and as a decorator."""

    @torch.compile(dynamic=False)
    def gate(x: torch.Tensor) -> torch.Tensor:
        return functional.silu(x) * x

    tuned = torch.compile(functional.gelu, options={"max_autotune": True})
    x = torch.randn(8, 8, device="cuda", requires_grad=True)
    tuned(gate(x)).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (8, 8)
