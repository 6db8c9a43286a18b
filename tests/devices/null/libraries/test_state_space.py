"""Mamba and causal-conv1d: their own Python code over the stand-ins, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch

from prismscale.devices.null.libraries import causal_conv1d, mamba_ssm

BF16 = torch.bfloat16
BATCH, CHANNELS, LENGTH, STATES = 2, 256, 4096, 16
conv_cuda: Any = causal_conv1d.stand_in().modules["causal_conv1d_cuda"]()
scan_cuda: Any = mamba_ssm.stand_in().modules["selective_scan_cuda"]()
needs_conv = pytest.mark.skipif(
    importlib.util.find_spec("causal_conv1d") is None,
    reason="CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE pip install --no-deps causal-conv1d",
)
needs_mamba = pytest.mark.skipif(
    importlib.util.find_spec("mamba_ssm") is None,
    reason="MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps mamba-ssm==2.3.1",
)


def _empty(*sizes: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="cuda", requires_grad=grad)


def _bytes_above(before: int) -> int:
    return torch.cuda.max_memory_allocated() - before


def _backward_of_convolution(x: torch.Tensor) -> int:
    """Bytes that the backward pass takes beside what it is given."""
    weight, bias = _empty(CHANNELS, 4), _empty(CHANNELS)
    dweight, dbias = torch.zeros_like(weight).float(), torch.zeros_like(bias).float()
    given = (x, weight, bias, torch.empty_like(x), None, None, None, torch.empty_like(x))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    conv_cuda.causal_conv1d_bwd(*given, dweight, dbias, None, True)
    assert torch.cuda.memory_allocated() == before
    return _bytes_above(before)


def test_a_convolution_fills_what_it_is_given() -> None:
    """Neither direction allocates anything, as long as sums may come in any order."""
    x = _empty(BATCH, CHANNELS, LENGTH)
    before = torch.cuda.memory_allocated()
    conv_cuda.causal_conv1d_fwd(
        x, _empty(CHANNELS, 4), None, None, None, torch.empty_like(x), None, True
    )
    assert torch.cuda.memory_allocated() == before
    assert _backward_of_convolution(x) == 0


def test_a_deterministic_convolution_keeps_partial_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four weights and a bias in float32: one a sequence, or one each 128 positions."""
    monkeypatch.setenv("CAUSAL_CONV1D_DETERMINISTIC", "1")
    whole = 4 * BATCH * CHANNELS * (4 + 1)
    assert whole <= _backward_of_convolution(_empty(BATCH, CHANNELS, LENGTH)) < 2 * whole + 8192
    channels_last = _empty(BATCH, LENGTH, CHANNELS).transpose(1, 2)
    in_pieces = whole * LENGTH // 128
    assert in_pieces <= _backward_of_convolution(channels_last) < in_pieces + 2 * whole


def test_a_scan_keeps_its_state_every_2048_positions() -> None:
    """Two numbers a state, in the matrix's type; the gate's output is apart."""
    u, matrix = _empty(BATCH, CHANNELS, LENGTH), _empty(CHANNELS, STATES, dtype=torch.float32)
    b = _empty(BATCH, 1, STATES, LENGTH)
    out, states, gated = scan_cuda.fwd(u, u, matrix, b, b, None, u, None, True)
    assert out.shape == gated.shape == u.shape
    assert (states.shape, states.dtype) == ((BATCH, CHANNELS, 2, 2 * STATES), torch.float32)
    grads = scan_cuda.bwd(*(u, u, matrix, b, b, None, u, None, u, states, out, None, True, False))
    du, ddelta, da, db, dc, dd, dbias, dz = grads
    assert (du.shape, ddelta.shape, da.shape, dz.shape) == (u.shape, u.shape, matrix.shape, u.shape)
    assert (db.dtype, dc.shape, dd, dbias) == (b.dtype, b.shape, None, None)


@needs_conv
@pytest.mark.filterwarnings("default")
def test_the_librarys_convolution_trains() -> None:
    """Gradients of input, weight and bias."""
    interface = importlib.import_module("causal_conv1d")
    x = _empty(BATCH, CHANNELS, LENGTH, grad=True)
    weight, bias = _empty(CHANNELS, 4, grad=True), _empty(CHANNELS, grad=True)
    interface.causal_conv1d_fn(x, weight, bias, activation="silu").sum().backward()
    assert all(t.grad is not None and t.grad.shape == t.shape for t in (x, weight, bias))


@needs_conv
@needs_mamba
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["Mamba", "Mamba2"])
def test_a_mamba_block_trains(kind: str) -> None:
    """Every parameter gets a gradient of its shape; Mamba 2's kernels are Triton's."""
    block = getattr(importlib.import_module("mamba_ssm"), kind)(
        256, d_state=64, expand=2, device="cuda", dtype=BF16
    )
    x = _empty(BATCH, 512, 256, grad=True)
    block(x).sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None and p.grad.shape == p.shape for p in block.parameters())
