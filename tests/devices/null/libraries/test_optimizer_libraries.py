"""bitsandbytes' and DeepSpeed's optimizers: their own Python code over the stand-ins."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch

from prismscale.devices.null.libraries.bitsandbytes import NativeLibrary
from prismscale.devices.null.runtime import active

BF16 = torch.bfloat16
ELEMENTS = 1 << 20
MOMENTS_8BIT = 2 * (ELEMENTS + 4 * ELEMENTS // 256)
"""Of Adam: a byte each, and a float32 for 256 of them."""
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="pip install --no-deps bitsandbytes",
)
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="pip install deepspeed"
)


def _parameter() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(1024, 1024, dtype=BF16, device="cuda"))
    parameter.grad = torch.zeros_like(parameter)
    return parameter


def _bytes_kept(optimizer: Any) -> int:
    before = torch.cuda.memory_allocated()
    optimizer.step()
    kept = torch.cuda.memory_allocated() - before
    optimizer.step()
    assert torch.cuda.memory_allocated() - before == kept, "nothing piles up"
    return kept


def test_what_the_native_library_cannot_do_here_says_so() -> None:
    """By the name of the C function."""
    with pytest.raises(NotImplementedError, match="cget_managed_ptr"):
        NativeLibrary().cget_managed_ptr(1)


def test_quantizing_costs_what_it_moves() -> None:
    """A launch, and no memory that stays."""
    before = torch.cuda.memory_allocated()
    NativeLibrary().cquantize_blockwise_bf16(1, 2, 3, 4, 256, ELEMENTS)
    assert torch.cuda.memory_allocated() == before


@needs_bitsandbytes
@pytest.mark.filterwarnings("default")
def test_moments_of_8_bits_take_a_byte_and_a_scale() -> None:
    """The maps of values are shared by all parameters."""
    library = importlib.import_module("bitsandbytes")
    kept = _bytes_kept(library.optim.AdamW8bit([_parameter()]))
    assert MOMENTS_8BIT <= kept < MOMENTS_8BIT + 16_384
    assert "bitsandbytes" in {stand_in.name for stand_in in active().stand_ins.used}


@needs_bitsandbytes
@pytest.mark.filterwarnings("default")
def test_small_parameters_keep_moments_of_32_bits() -> None:
    """Below 4,096 elements."""
    library = importlib.import_module("bitsandbytes")
    parameter = torch.nn.Parameter(torch.zeros(512, dtype=BF16, device="cuda"))
    parameter.grad = torch.zeros_like(parameter)
    kept = _bytes_kept(library.optim.AdamW8bit([parameter]))
    assert 2 * 4 * 512 <= kept < 16_384


@needs_bitsandbytes
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("layer", ["Linear4bit", "Linear8bitLt"])
def test_a_quantized_layer_runs(layer: str) -> None:
    """Its output has the shape of the product, and the gradient reaches the input."""
    library = importlib.import_module("bitsandbytes")
    module = getattr(library.nn, layer)(256, 512, bias=False).to("cuda")
    x = torch.randn(64, 256, dtype=torch.float16, device="cuda", requires_grad=True)
    out = module(x)
    assert out.shape == (64, 512)
    out.sum().backward()
    assert x.grad is not None


@needs_deepspeed
@pytest.mark.filterwarnings("default")
def test_deepspeeds_fused_adam_is_not_compiled() -> None:
    """Its builder finds it loaded; two moments in the parameter's type."""
    adam = importlib.import_module("deepspeed.ops.adam")
    kept = _bytes_kept(adam.FusedAdam([_parameter()]))
    assert kept == 2 * 2 * ELEMENTS
    assert "DeepSpeed's operators" in {stand_in.name for stand_in in active().stand_ins.used}
