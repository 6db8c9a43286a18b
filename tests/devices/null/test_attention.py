"""Which kernel scaled_dot_product_attention takes: that of torch's build for the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from support import op_log
from support.deterministic import deterministic

CHOICE = """
import sys, torch
from torch.nn.attention import SDPBackend
from prismscale.devices.null.gpus import device_spec
from prismscale.devices.null.runtime import activate
activate(device_spec(sys.argv[1]))
q = torch.empty(2, 8, 256, int(sys.argv[2]), device="cuda", dtype=torch.bfloat16)
print(SDPBackend(torch._fused_sdp_choice(q, q, q)).name)
"""


def heads(
    dim: int = 128, length: int = 256, dtype: torch.dtype = torch.bfloat16, n_heads: int = 8
) -> torch.Tensor:
    """Two sequences."""
    return torch.empty(2, n_heads, length, dim, device="cuda", dtype=dtype)


def choice(q: torch.Tensor, k: torch.Tensor | None = None, **named: Any) -> str:
    """Name of the backend that torch is told to take."""
    k = q if k is None else k
    return SDPBackend(torch._fused_sdp_choice(q, k, k, **named)).name


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_hopper_takes_cudnn(dim: int) -> None:
    """In 16 bits and for heads of up to 256, with or without a causal mask or a mask of values."""
    q = heads(dim)
    mask = torch.zeros(256, 256, device="cuda", dtype=q.dtype)
    assert choice(q) == choice(q, is_causal=True) == "CUDNN_ATTENTION"
    assert choice(q, attn_mask=mask) == "CUDNN_ATTENTION"


@pytest.mark.parametrize(("warns", "expected"), [(False, "FLASH"), (True, "CUDNN")])
def test_a_deterministic_program_takes_flash_attention(warns: bool, expected: str) -> None:
    """Torch holds cuDNN's for not deterministic, unless the program only wants to be warned."""
    with deterministic(warn_only=warns):
        assert choice(heads()) == f"{expected}_ATTENTION"


def test_a_deterministic_backward_pass_of_flash_attention_says_so() -> None:
    """With it the law knows its price; and 132 multiprocessors share 16 heads' accumulators."""
    q = heads().requires_grad_()
    with deterministic():
        out = scaled_dot_product_attention(q, q, q).sum()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        launched = op_log.ops_of(out.backward)
    calls = [op.signature for op in launched if "attention" in op.signature.name]
    assert [dict(call.arguments)["deterministic"] for call in calls] == [(1,)]
    accumulators = -(-132 // 16) * q.numel() * 4
    assert torch.cuda.max_memory_allocated() - before > accumulators


def test_what_cudnn_cannot_goes_to_the_next() -> None:
    """Dropout that is no multiple of 1/16, one key, float32, causal masks of two lengths."""
    assert choice(heads(), dropout_p=0.1) == "FLASH_ATTENTION"
    assert choice(heads(), dropout_p=0.125) == "CUDNN_ATTENTION"
    assert choice(heads(), heads(length=1)) == "FLASH_ATTENTION"
    assert choice(heads(dtype=torch.float32)) == "EFFICIENT_ATTENTION"
    assert choice(heads(), heads(length=512), is_causal=True) == "EFFICIENT_ATTENTION"
    assert choice(heads(dim=100, dtype=torch.float64)) == "MATH"


def test_the_program_chooses() -> None:
    """``sdpa_kernel`` goes before the order of the GPU."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert choice(heads()) == "FLASH_ATTENTION"
    order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(order, set_priority=True):
        assert choice(heads()) == "EFFICIENT_ATTENTION"
    assert choice(heads()) == "CUDNN_ATTENTION"


def test_the_backward_holds_what_cudnn_holds() -> None:
    """While it runs: dQ and the row sums in float32, dK and dV for every head of the queries."""
    q, k = heads().requires_grad_(), heads(n_heads=2).requires_grad_()
    out = scaled_dot_product_attention(q, k, k, enable_gqa=True)
    gradient = torch.empty_like(out)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out.backward(gradient)
    results = 2 * (q.numel() + 3 * k.numel())  # dQ; dK, dV and their sum
    workspace = 4 * q.numel() + 4 * q.numel() // 128 + 2 * 2 * q.numel()
    peak = torch.cuda.max_memory_allocated() - before
    assert workspace < peak <= workspace + results


def peak_over(call: Callable[[], object]) -> int:
    """Bytes that ``call`` holds at most, beyond what is held before it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(("dim", "tile"), [(32, 64), (64, 64), (96, 128), (128, 128)])
def test_the_backward_holds_what_efficient_attention_holds(dim: int, tile: int) -> None:
    """Row sums, and dQ in float32: whole tiles of it, each with 16 bytes more."""
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        q = heads(dim=dim).requires_grad_()
        out = scaled_dot_product_attention(q, q, q)
        gradient = torch.empty_like(out)
        peak = peak_over(lambda: out.backward(gradient))
    rows = q.numel() // dim
    workspace = 4 * rows + 4 * rows * tile + 16 * rows // tile
    results = 3 * 2 * q.numel()
    assert workspace < peak <= workspace + results + 2 * 2 * q.numel()


def test_wide_heads_of_efficient_attention_have_an_accumulator() -> None:
    """Up to 128 it lies in registers."""
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        narrow, wide = heads(dim=128), heads(dim=256)
        held = [
            peak_over(lambda t=t: scaled_dot_product_attention(t, t, t)) / t.numel()
            for t in (narrow, wide)
        ]
    assert held[1] - held[0] == pytest.approx(4, abs=0.1)


@pytest.mark.parametrize(
    ("gpu", "dim", "deprioritized", "expected"),
    [
        ("a100-80g", 128, "", "FLASH_ATTENTION"),
        ("b200", 128, "", "CUDNN_ATTENTION"),
        ("b200", 256, "", "FLASH_ATTENTION"),
        ("h100-sxm", 128, "1", "FLASH_ATTENTION"),
    ],
)
def test_the_order_is_that_of_the_gpu(
    gpu: str, dim: int, deprioritized: str, expected: str
) -> None:
    """Ampere takes flash, Blackwell cuDNN; an environment variable puts cuDNN last, as in torch."""
    env = os.environ | {"TORCH_CUDNN_SDPA_DEPRIORITIZED": deprioritized}
    command = [sys.executable, "-c", CHOICE, gpu, str(dim)]
    child = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert child.stdout.strip() == expected


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_cudnn_attention_forward"),
    reason="this torch has no such operator",
)
def test_packed_sequences_on_cudnn_have_the_shapes_of_their_tokens() -> None:
    """torch has no Meta kernel for what it runs varlen_attn on; gradients are as their tensors."""
    q = torch.empty(96, 8, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.empty(96, 2, 64, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, 32, 96], device="cuda", dtype=torch.int32)
    lengths = (starts, starts, 64, 64)
    out, statistics, *_, seed, offset, _ = torch.ops.aten._cudnn_attention_forward(
        q, k, k, None, *lengths, True, 0.0, True
    )
    grads = torch.ops.aten._cudnn_attention_backward(
        out, q, k, k, out, statistics, seed, offset, starts, *lengths, 0.0, True
    )

    assert out.shape == q.shape
    assert statistics.numel() == 96 * 8
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]
