"""Transformer Engine's tensors of several experts and of 4-bit numbers, and their products."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prismscale.cost.kernel import load_kernel_model
from prismscale.devices.null import value_policy
from prismscale.devices.null.libraries.transformer_engine import make_extension
from prismscale.devices.null.libraries.transformer_engine.quantized_tensors import fp4_scales
from prismscale.devices.null.libraries.transformer_engine.versions import installed, is_since
from prismscale.devices.null.runtime import active
from support.te_products import gemm

tex: Any = make_extension()
BF16 = torch.bfloat16
EXPERTS, TOKENS, HIDDEN, WIDTH = 4, 512, 256, 384


def _empty(*sizes: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="cuda")


def _grouped(
    rows: int, columns: int, rows_of_experts: torch.Tensor | None = None
) -> SimpleNamespace:
    """What products read of the library's class, unquantized."""
    data = _empty(rows * columns)
    return SimpleNamespace(
        num_tensors=EXPERTS,
        logical_shape=(rows, columns),
        first_dims=rows_of_experts,
        quantizer=None,
        rowwise_data=data,
        columnwise_data=None,
        scale_inv=None,
    )


def _multiply(a: Any, transa: bool, b: Any, transb: bool, out: Any, bias: Any = None) -> Any:
    one = _empty(EXPERTS, dtype=torch.float32)
    setup = _empty(tex.get_grouped_gemm_setup_workspace_size(EXPERTS), dtype=torch.uint8)
    function = tex.te_general_grouped_gemm_for_discrete_in
    return function(a, transa, b, transb, out, bias, None, one, one, setup, setup, True, 132)


def _signatures(start: str) -> list[str]:
    """Of the calls so far."""
    library = active().library
    texts = [library.ps_signature(i).decode() for i in range(library.ps_signature_count())]
    return [text for text in texts if text.startswith(start)]


def _were_multiplied(*extents: int) -> bool:
    """Whether products of all experts of these sizes were launched as one kernel."""
    expected = ",".join(map(str, (EXPERTS, *extents)))
    return any(
        f"extents={expected};launches=1;bits=16" in text
        for text in _signatures("transformer_engine::grouped_gemm")
    )


@pytest.mark.parametrize(
    ("a", "transa", "b", "transb", "out", "extents"),
    [
        ("weights", True, (TOKENS, HIDDEN), False, (TOKENS, WIDTH), (128, WIDTH, HIDDEN)),
        ("weights", False, (TOKENS, WIDTH), False, (TOKENS, HIDDEN), (128, HIDDEN, WIDTH)),
        ("input", False, (TOKENS, WIDTH), True, "gradients", (WIDTH, HIDDEN, 128)),
    ],
    ids=["forward", "gradient of the input", "gradients of the weights"],
)
def test_a_product_in_one_kernel_has_as_many_rows_for_each_expert(
    a: str, transa: bool, b: tuple[int, int], transb: bool, out: Any, extents: tuple[int, ...]
) -> None:
    """How many each has lies on the device: the mean of them."""
    weights = [_empty(WIDTH, HIDDEN) for _ in range(EXPERTS)]
    first: Any = weights if a == "weights" else _grouped(TOKENS, HIDDEN)
    gradients = [_empty(WIDTH, HIDDEN, dtype=torch.float32) for _ in range(EXPERTS)]
    last: Any = gradients if out == "gradients" else _grouped(*out)
    assert _multiply(first, transa, _grouped(*b), transb, last) is last
    assert _were_multiplied(*extents)


def test_rows_of_experts_that_are_known_count_instead_of_those_that_have_room() -> None:
    """A program reserves rows for the worst case; kernels compute those that are filled."""
    filled = torch.empty(EXPERTS, dtype=torch.int64, device="cuda")
    value_policy.state(filled, [64, 64, 64, 64])
    weights = [_empty(WIDTH, HIDDEN) for _ in range(EXPERTS)]
    product = _grouped(TOKENS, WIDTH, filled)
    assert _multiply(weights, True, _grouped(TOKENS, HIDDEN, filled), False, product) is product
    assert _were_multiplied(64, WIDTH, HIDDEN)


def test_sizes_that_do_not_fit_are_refused() -> None:
    """As the library does, in torch's words for products."""
    weights = [_empty(WIDTH, HIDDEN) for _ in range(EXPERTS)]
    with pytest.raises(RuntimeError, match="Invalid matrix dimensions"):
        _multiply(weights, True, _grouped(TOKENS, WIDTH), False, _grouped(TOKENS, WIDTH))


def test_what_a_product_sets_up_has_room_for_pointers_and_sizes_of_each_expert() -> None:
    """Eight arrays of pointers, of a multiple of 16 bytes but for the last, and seven of 4 bytes
    (GroupedGemmSetupWorkspace, cublaslt_grouped_gemm.cu)."""
    assert tex.get_grouped_gemm_setup_workspace_size(8) == 8 * 64 + 7 * 32 + 256
    assert tex.get_grouped_gemm_setup_workspace_size(3) == 7 * 32 + 24 + 7 * 12 + 256


def _mx_tensor(rows: int, columns: int) -> SimpleNamespace:
    return SimpleNamespace(
        _rowwise_scale_inv=_empty(rows, columns // 32, dtype=torch.uint8),
        _columnwise_scale_inv=None,
        _with_gemm_swizzled_scales=False,
    )


def test_scales_of_many_tensors_come_to_lie_in_one_buffer() -> None:
    """In the tensor cores' order, with their shapes; the caller marks them."""
    tensors = [_mx_tensor(128, 512), _mx_tensor(256, 512)]
    tex.multi_tensor_swizzle_scales_for_gemm_unchecked_(tensors, True, False)
    scales = [tensor._rowwise_scale_inv for tensor in tensors]
    assert [tuple(each.shape) for each in scales] == [(128, 16), (256, 16)]
    storages = {each.untyped_storage().data_ptr() for each in scales}
    assert len(storages) == 1
    for tensor in tensors:
        tensor._with_gemm_swizzled_scales = True
    tex.multi_tensor_swizzle_scales_for_gemm_unchecked_(tensors, True, False)
    assert tensors[0]._rowwise_scale_inv is scales[0], "not a second time"


def test_tensors_are_transposed_to_heads_first() -> None:
    """Into outputs where they are given; what is None stays None."""
    given = _empty(64, 2, 8, 4, dtype=torch.uint8)
    out = _empty(2, 8, 64, 4, dtype=torch.uint8)
    assert tex.multi_tensor_transpose_to_bhsd([given, None], "sbhd", [out, None]) == [out, None]
    (made,) = tex.multi_tensor_transpose_to_bhsd([given], original_format="sbhd")
    assert made.shape == (2, 8, 64, 4)


@pytest.mark.skipif(
    not installed() or not is_since(2, 16),
    reason="pip install --no-deps 'transformer-engine>=2.16', with what it imports",
)
@pytest.mark.filterwarnings("default")  # the library's own
def test_tokens_of_experts_are_quantized_into_one_tensor() -> None:
    """Rows and columns with a scale for 32 elements of MXFP8; the sums of rows beside them."""
    te: Any = importlib.import_module("transformer_engine.pytorch")
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3, rowwise=True, columnwise=True)
    splits = torch.full((EXPERTS,), TOKENS // EXPERTS, device="cuda")
    grouped, sums = tex.bgrad_group_quantize(_empty(TOKENS, HIDDEN), quantizer, EXPERTS, splits)
    assert grouped.rowwise_data.shape == grouped.columnwise_data.shape == (TOKENS * HIDDEN,)
    assert grouped.scale_inv.numel() == TOKENS * HIDDEN // 32
    assert grouped.tensor_offsets.shape == (EXPERTS + 1,)
    assert sums.shape == (EXPERTS, HIDDEN)


def test_4_bit_factors_are_multiplied_twice_as_fast() -> None:
    """A product of tensors of two numbers a byte says so; the shapes are those of the numbers."""
    weight, rows = (_fp4_tensor(n, 4096) for n in (8192, 2048))
    out = gemm(weight, True, rows, False)[0]
    assert out.shape == (2048, 8192)
    (text,) = [t for t in _signatures("transformer_engine::generic_gemm.gemm") if "bits=4" in t]
    assert "extents=1,2048,8192,4096" in text
    b200 = load_kernel_model("b200")
    in_8_bits = b200.cost(text.replace("bits=4", "bits=8"))
    assert 0.4 < b200.cost(text).device_ns / in_8_bits.device_ns < 0.9


def _fp4_tensor(rows: int, columns: int) -> Any:
    tensor = NVFP4Tensor()
    tensor._rowwise_data = _empty(rows, columns // 2, dtype=torch.uint8)
    tensor._rowwise_scale_inv = _empty(rows, columns // 16, dtype=torch.uint8)
    return tensor


class NVFP4Tensor:
    """What products read of the library's class."""

    _fp4_dtype = 0
    _columnwise_data = _columnwise_scale_inv = None
    _amax_rowwise = _amax_columnwise = None
    _with_gemm_swizzled_scales = False


def test_scales_of_4_bit_numbers_are_padded_for_the_tensor_cores() -> None:
    """One for 16 numbers, in tiles of 128 × 4."""
    assert fp4_scales(1000, 512) == (1024, 32)
    assert fp4_scales(128, 1040) == (128, 68)


def test_4_bit_numbers_are_transposed_two_a_byte() -> None:
    """(M, K / 2) bytes become (K, M / 2)."""
    assert tex.nvfp4_data_transpose(_empty(256, 64, dtype=torch.uint8)).shape == (128, 128)
