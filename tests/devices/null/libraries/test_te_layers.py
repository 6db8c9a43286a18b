"""Transformer Engine's own Python code over the stand-in, where its wheel is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch

BF16 = torch.bfloat16
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None,
        reason="pip install --no-deps transformer-engine==2.9.0, with what it imports",
    ),
    pytest.mark.filterwarnings("default"),  # the library's own
]


@pytest.fixture
def te() -> Any:
    """``transformer_engine.pytorch``, imported where the null device is active."""
    return importlib.import_module("transformer_engine.pytorch")


def _input() -> torch.Tensor:
    return torch.randn(512, 2, 1024, device="cuda", dtype=BF16, requires_grad=True)


@pytest.mark.parametrize(
    "layer",
    [
        lambda te: te.Linear(1024, 2048, params_dtype=BF16),
        lambda te: te.LayerNormLinear(1024, 2048, params_dtype=BF16, normalization="RMSNorm"),
        lambda te: te.LayerNormMLP(1024, 4096, params_dtype=BF16, activation="swiglu"),
        lambda te: te.LayerNorm(1024, params_dtype=BF16),
        lambda te: te.RMSNorm(1024, params_dtype=BF16),
    ],
)
def test_a_layer_trains(te: Any, layer: Any) -> None:
    """Every parameter and the input get gradients of their shape."""
    module, x = layer(te), _input()
    module(x).sum().backward()
    assert x.grad is not None
    assert all(p.grad.shape == p.shape for p in module.parameters())


def test_the_workspace_of_products_stays(te: Any) -> None:
    """32 MiB and 1 KiB on Hopper, made with the first product."""
    linear = te.Linear(64, 64, params_dtype=BF16)
    x = torch.empty(64, 64, device="cuda", dtype=BF16)
    linear(x)
    sizes = {
        block["size"] for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]
    }
    assert (32 << 20) + 1024 in sizes


def test_attention_is_cudnns(te: Any) -> None:
    """Its output and statistics are kept, no scores."""
    qkv = [
        torch.empty(2048, 1, 16, 64, device="cuda", dtype=BF16, requires_grad=True)
        for _ in range(3)
    ]
    attention = te.DotProductAttention(16, 64, attention_dropout=0.0, attn_mask_type="causal")
    before = torch.cuda.memory_allocated()
    out = attention(*qkv)
    kept = torch.cuda.memory_allocated() - before
    assert out.nbytes <= kept < out.nbytes + (1 << 20)
    out.sum().backward()
    assert all(tensor.grad is not None for tensor in qkv)


@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"])
def test_a_layer_trains_with_8_bits(te: Any, recipe: str) -> None:
    """Weights in 8 bits are kept from step to step; so are delayed scales."""
    layer = te.TransformerLayer(
        1024,
        4096,
        8,
        params_dtype=BF16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="causal",
    )
    recipes = importlib.import_module("transformer_engine.common.recipe")
    held = []
    for _ in range(3):
        x = _input()
        with te.fp8_autocast(enabled=True, fp8_recipe=getattr(recipes, recipe)()):
            out = layer(x)
        out.sum().backward()
        del out, x
        held.append(torch.cuda.memory_allocated())
    assert held[1] == held[2], "nothing piles up"


def test_adam_keeps_two_moments_of_float32(te: Any) -> None:
    """Eight bytes a parameter."""
    linear = te.Linear(1024, 1024, bias=False, params_dtype=BF16)
    optimizer = te.optimizers.FusedAdam(linear.parameters())
    linear(_input()).sum().backward()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.memory_allocated() - before >= 8 * 1024 * 1024
