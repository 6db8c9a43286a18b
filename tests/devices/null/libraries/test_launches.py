"""Kernels of stand-ins reach the recorder and the cost model as what they say they are."""

from __future__ import annotations

import pytest
import torch

from prismscale.cost.kernel import load_kernel_model
from prismscale.devices.null.libraries import attention, gemm, launch, memory
from prismscale.devices.null.runtime import active
from prismscale.errors import UsageError
from support import op_log

MODEL = load_kernel_model("h100-sxm")


def _signature(call: str) -> str:
    """The text of the only call of that name so far."""
    library = active().library
    texts = [library.ps_signature(i).decode() for i in range(library.ps_signature_count())]
    (found,) = [text for text in texts if text.startswith(call)]
    return found


def _empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="cuda")


def test_a_product_costs_what_atens_does() -> None:
    """The same shapes, by the same roofline, to the nanosecond."""
    a, b, out = _empty(4096, 2048), _empty(2048, 8192), _empty(4096, 8192)
    cost = gemm((1, 4096, 8192, 2048))
    launch("test_launches::product", cost, reads=[a, b], writes=[out])
    torch.mm(a, b, out=out)
    mine, atens = (MODEL.cost(_signature(c)) for c in ("test_launches::product", "aten::mm.out"))
    assert mine.kind == atens.kind == "gemm"
    assert abs(mine.device_ns - atens.device_ns) < 0.1 * atens.device_ns


def test_products_of_8_bits_are_faster() -> None:
    """Their operands are bytes to torch, so the kernel says it."""
    a, b = _empty(8192, 8192, dtype=torch.uint8), _empty(8192, 8192, dtype=torch.uint8)
    product = (1, 8192, 8192, 8192)
    out = _empty(8192, 8192)
    launch("test_launches::fp8", gemm(product, bits=8), reads=[a, b], writes=[out])
    wide = [tensor.to(torch.bfloat16) for tensor in (a, b)]
    launch("test_launches::bf16", gemm(product), reads=wide, writes=[out])
    fp8, bf16 = (MODEL.cost(_signature(f"test_launches::{name}")) for name in ("fp8", "bf16"))
    assert fp8.source == "modelled"
    assert 0.5 < fp8.device_ns / bf16.device_ns < 0.6


def test_attention_costs_what_atens_does() -> None:
    """The same scores of flash attention, forward."""
    q, k, v = (_empty(2, 16, 2048, 128) for _ in range(3))
    out, rows, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    cost = attention(
        batch_heads=32, length=2048, keys=2048, head_size=128, value_size=128, causal=True
    )
    launch("test_launches::attention", cost, reads=[q, k, v], writes=[out, rows])
    mine = MODEL.cost(_signature("test_launches::attention"))
    atens = MODEL.cost(_signature("aten::_scaled_dot_product_flash_attention"))
    assert mine.kind == "attention"
    assert mine.device_ns == atens.device_ns


def test_what_is_bound_by_memory_costs_its_bytes() -> None:
    """All that it reads and writes, unless it says otherwise; each launch has its base time."""
    x, out = _empty(1 << 26), _empty(1 << 26)  # more than any cache
    launch("test_launches::all", memory("pointwise"), reads=[x], writes=[out])
    launch("test_launches::half", memory("pointwise", n_bytes=x.nbytes), reads=[x], writes=[out])
    launch("test_launches::twice", memory("pointwise", launches=2), reads=[x], writes=[out])
    whole, half, twice = (
        MODEL.cost(_signature(f"test_launches::{name}")).device_ns
        for name in ("all", "half", "twice")
    )
    base = MODEL.profile.memory["pointwise"].base_ns
    assert half - base == pytest.approx((whole - base) / 2, abs=2)
    assert twice - whole == pytest.approx(base, abs=2)


def test_a_launch_is_recorded_on_the_stream_that_is_current() -> None:
    """Its device, stream and tensors."""
    x, stream = _empty(8), torch.cuda.Stream()
    op_log.drain_ops()
    op_log.record_ops()
    with torch.cuda.stream(stream):
        launch("test_launches::here", memory("copy"), reads=[x, None, torch.ones(3)], writes=[x])
    op_log.record_ops(False)
    (record,) = op_log.drain_ops()
    assert record.signature.name == "test_launches::here.copy"
    assert [tensor.shape for tensor in record.signature.inputs] == [(8,), (8,)]
    assert record.stream == stream.stream_id


def test_a_launch_has_no_gradient() -> None:
    """The library's own code has one; torch does not ask the kernel for it."""
    x = _empty(8).requires_grad_()
    out = _empty(8)
    launch("test_launches::silent", memory("copy"), reads=[x], writes=[out])
    assert not out.requires_grad


def test_what_is_written_is_forgotten() -> None:
    """A value that followed from constants is unknown once a kernel wrote over it."""
    flag = torch.zeros((), dtype=torch.int64, device="cuda")
    assert flag.item() == 0
    launch("test_launches::writes", memory("fill"), writes=[flag])
    assert flag.item() == 1, "an unknown integer is answered 1"


def test_a_kind_that_no_profile_has_is_refused() -> None:
    """The message has the nearest one."""
    with pytest.raises(UsageError, match="pointwise"):
        memory("pointwize")
    with pytest.raises(UsageError, match="name its library"):
        launch("scale", memory("copy"))
