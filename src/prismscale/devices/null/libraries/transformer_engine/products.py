"""Matrix products: cuBLAS on one stream, and the experts' products on several.

The library's Python code allocates the workspaces. Source: pytorch/csrc/extensions/gemm.cpp and
pytorch/csrc/util.cpp of Transformer Engine 2.11.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prismscale.cost.kernel_gemm import TF32_BITS
from prismscale.devices.null.libraries.launches import gemm, launch, memory
from prismscale.devices.null.libraries.transformer_engine.casts import cast_into
from prismscale.devices.null.libraries.transformer_engine.enums import torch_dtype
from prismscale.devices.null.libraries.transformer_engine.quantized_tensors import (
    DELAYED,
    bits_of,
    buffers,
    create,
    empty_as,
    operand,
    recipe_of,
    shape_of,
)
from prismscale.devices.null.libraries.transformer_engine.user_buffers import (
    CommOverlapCore,
    Product,
)

_TE = "transformer_engine::"


def generic_gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: CommOverlapCore | None = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Multiply ``b`` by ``a`` in BLAS order.

    Returns:
        Output, gradient of the bias, input of GELU, and extra output.
    """
    shape, product = product_of(shape_of(a), transa, shape_of(b), transb)
    dtype = torch_dtype(output_dtype) if output_dtype is not None else _dtype_of(a)
    bits = _bits(a, b, dtype)
    reads: list[Tensor | None] = [*operand(a, rowwise=transa), *operand(b, rowwise=not transb)]
    if accumulate:
        reads += [out]
    if out is None:
        out = create(quantizer, shape, dtype)
    result = empty_as(shape, dtype) if _casts_afterwards(a, b, quantizer) else out
    made: list[Any] = [None, None]  # gradient of the bias, input of GELU
    if bias is not None and grad:
        made[0] = empty_as(shape_of(b)[-1:], dtype)
    elif bias is not None:
        reads += [bias.contiguous()]
    if gelu and grad:
        reads += [gelu_in]
    elif gelu:
        made[1] = empty_as(shape, torch_dtype(bias_type) if bits < 16 else dtype)
    if all(product):
        scales = [*_swizzled(a, rowwise=transa), *_swizzled(b, rowwise=not transb)]
        writes = [*buffers(result), *made]

        def run(part: Product) -> None:
            launch(f"{_TE}generic_gemm", gemm(part, bits=bits), reads=reads, writes=writes)

        if comm_overlap is None:
            run(product)
        else:
            comm_overlap.overlap(comm_type, product, run, extra_output, bulk=bulk_overlap)
        del scales
    elif not accumulate and isinstance(result, Tensor):
        result.zero_()
    if result is not out:
        cast_into(result, out, quantizer)
    return [out, *made, extra_output]


def product_of(
    a: Sequence[int], transa: bool, b: Sequence[int], transb: bool
) -> tuple[tuple[int, ...], Product]:
    """Return the shape of the output, and the product as (batch, M, N, K)."""
    a_rows, b_rows = math.prod(a[:-1]), math.prod(b[:-1])
    n, k = (a_rows, a[-1]) if transa else (a[-1], a_rows)
    m, k_of_b = (b[-1], b_rows) if transb else (b_rows, b[-1])
    if k != k_of_b:
        raise RuntimeError(
            f"Invalid matrix dimensions for GEMM (A={tuple(a)}, transa={transa}, B={tuple(b)}, "
            f"transb={transb})"
        )
    shape = (m, n) if transb else (*b[:-1], n)
    return tuple(shape), (1, m, n, k)


def _bits(a: Any, b: Any, dtype: torch.dtype) -> int:
    """Return the bits of the floats that are multiplied: TF32 if all are of 32 bits."""
    bits = min(bits_of(a), bits_of(b))
    if bits == 16 and {_dtype_of(a), _dtype_of(b), dtype} == {torch.float32}:
        return TF32_BITS
    return bits


def _dtype_of(tensor: Any) -> torch.dtype:
    if hasattr(tensor, "_fp8_dtype"):
        return torch_dtype(tensor._fp8_dtype)
    dtype: torch.dtype = tensor.dtype
    return dtype


_SCALED_BY_BLOCKS = ("MXFP8Tensor", "NVFP4Tensor")
"""Prefixes of the names of classes whose scales the tensor cores read."""
_BLOCK_SCALES = {True: "_rowwise_scale_inv", False: "_columnwise_scale_inv"}


def _casts_afterwards(a: Any, b: Any, quantizer: Any) -> bool:
    """Return whether a kernel of its own casts the output.

    With delayed scaling, a product of 8-bit tensors that have a single scale casts it itself.
    """
    if quantizer is None:
        return False
    whole = hasattr(a, "_scale_inv") or hasattr(b, "_scale_inv")
    return not (whole and recipe_of(quantizer) == DELAYED)


def _swizzled(tensor: Any, *, rowwise: bool) -> list[Tensor]:
    """Return block scales in the tensor cores' order, for as long as the product runs."""
    if not type(tensor).__name__.startswith(_SCALED_BY_BLOCKS):
        return []
    if getattr(tensor, "_with_gemm_swizzled_scales", False):
        return []
    scales = operand(tensor, rowwise=rowwise)[1]
    return [_in_order_of_products(scales)]


def _in_order_of_products(scales: Tensor) -> Tensor:
    swizzled = empty_as(scales.shape, torch.uint8)
    launch(f"{_TE}swizzle_scaling_factors", memory("copy"), reads=[scales], writes=[swizzled])
    return swizzled


def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """Replace the scales of ``tensor`` by the same in the tensor cores' order."""
    if not type(tensor).__name__.startswith(_SCALED_BY_BLOCKS):
        return
    if tensor._with_gemm_swizzled_scales:
        return
    for name in _BLOCK_SCALES.values():
        if (scales := getattr(tensor, name)) is not None:
            setattr(tensor, name, _in_order_of_products(scales))
    tensor._with_gemm_swizzled_scales = True


def multi_tensor_swizzle_scales_for_gemm_(
    tensors: Sequence[Any], rowwise_usage: bool, columnwise_usage: bool
) -> None:
    """Reorder the row-wise or the column-wise scales of many tensors, which then share one buffer.

    The caller marks the tensors as reordered.
    """
    del columnwise_usage  # the opposite of ``rowwise_usage``
    name = _BLOCK_SCALES[rowwise_usage]
    given = _unswizzled(tensors, name)
    for tensor, scales in zip(given, _together(given, name), strict=True):
        setattr(tensor, name, scales)


def swizzled_together(tensors: Sequence[Any], *, rowwise: bool) -> list[Tensor]:
    """Return the scales of ``tensors`` that are not yet in the tensor cores' order, reordered.

    They are views of one buffer.
    """
    name = _BLOCK_SCALES[rowwise]
    return _together(_unswizzled(tensors, name), name)


def _together(tensors: Sequence[Any], name: str) -> list[Tensor]:
    scales = [getattr(tensor, name) for tensor in tensors]
    if not scales:
        return []
    buffer = empty_as([sum(each.numel() for each in scales)], torch.uint8)
    launch(f"{_TE}swizzle_scaling_factors", memory("copy"), reads=scales, writes=[buffer])
    parts = buffer.split([each.numel() for each in scales])
    return [part.view(each.shape) for each, part in zip(scales, parts, strict=True)]


def _unswizzled(tensors: Sequence[Any], name: str) -> list[Any]:
    return [
        tensor
        for tensor in tensors
        if not getattr(tensor, "_with_gemm_swizzled_scales", True)
        and getattr(tensor, name, None) is not None
    ]


def te_general_grouped_gemm(
    a: Sequence[Any],
    transa: bool,
    b: Sequence[Any],
    transb: bool,
    out: Sequence[Tensor] | None,
    output_dtype: Any,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu: Sequence[Tensor],
    grad: bool,
    workspace: Sequence[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[Tensor]:
    """Run one product for each expert; ``bias`` takes its gradients.

    The products are started on a few streams, but cost as much as one after another (SimuMax's rows
    of a B200: prismscale validate kernels).
    """
    found = [
        product_of(shape_of(one), transa, shape_of(other), transb)
        for one, other in zip(a, b, strict=True)
    ]
    dtype = torch_dtype(output_dtype)
    writes = [empty_as(shape, dtype) for shape, _ in found] if out is None else list(out)
    products = [product for _, product in found if all(product[1:])]
    scales = [
        buffer
        for one, other in zip(a, b, strict=True)
        for buffer in (*_swizzled(one, rowwise=transa), *_swizzled(other, rowwise=not transb))
    ]
    reads = [buffer for one in a for buffer in operand(one, rowwise=transa)]
    reads += [buffer for one in b for buffer in operand(one, rowwise=not transb)]
    if grad:
        writes += [tensor for tensor in bias if tensor.numel()]
    cost = gemm(*products, bits=_bits(a[0], b[0], dtype))
    if products:
        launch(
            f"{_TE}grouped_gemm", cost, reads=reads + (writes if accumulate else []), writes=writes
        )
    del scales
    return bias


FUNCTIONS = {
    "generic_gemm": generic_gemm,
    "te_general_grouped_gemm": te_general_grouped_gemm,
    "swizzle_scales_for_gemm_": swizzle_scales_for_gemm_,
    "multi_tensor_swizzle_scales_for_gemm_": multi_tensor_swizzle_scales_for_gemm_,
    "multi_tensor_swizzle_scales_for_gemm_unchecked_": multi_tensor_swizzle_scales_for_gemm_,
}
