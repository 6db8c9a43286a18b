"""Tensors of several experts in one buffer, and their products in one kernel.

The number of rows of each expert lies on the device, so products are costed as if all experts had
equally many. Their total is the number of rows that there are, if it is known, otherwise the number
that the buffer has room for. Source: pytorch/csrc/quantizer.cpp,
pytorch/csrc/extensions/{cast,gemm,swizzle}.cpp and common/gemm/cublaslt_grouped_gemm.cu of
Transformer Engine 2.18.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null import value_policy
from prismscale.devices.null.libraries.launches import gemm, launch, memory
from prismscale.devices.null.libraries.transformer_engine.casts import share_amax
from prismscale.devices.null.libraries.transformer_engine.experts import splits_to_offsets
from prismscale.devices.null.libraries.transformer_engine.products import (
    product_of,
    swizzled_together,
)
from prismscale.devices.null.libraries.transformer_engine.quantized_tensors import (
    BLOCKWISE,
    CURRENT,
    MXFP8,
    NVFP4,
    bits_of,
    bits_of_quantizer,
    empty_as,
    multiplies_any_layout,
    mx_scales,
    operand,
    recipe_of,
    scales_of,
    shape_of,
)

_TE = "transformer_engine::"
_CLASSES = {
    True: "transformer_engine.pytorch.tensor.storage.grouped_tensor_storage",
    False: "transformer_engine.pytorch.tensor.grouped_tensor",
}
"""Module of the class of grouped tensors, by whether a tensor is for the library's own use."""
_POINTERS, _NUMBERS, _SETUP_ALIGNMENT = 8, 7, 256
"""A product sets up arrays with an element for each expert: the number of arrays with elements of
8 bytes, the number of those with 4 bytes, and the alignment of the workspace in bytes."""
_COLUMNS = "columnwise_"
"""Prefix of the names of buffers that are used column by column."""


def group_quantize(
    tensor: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Tensor | None,
    last_dims: Tensor | None = None,
    tensor_offsets: Tensor | None = None,
    noop_flag: Tensor | None = None,
) -> Any:
    """Return ``tensor`` (rows, columns) of ``num_tensors`` experts as ``quantizer`` wants it."""
    grouped = _create(tensor, quantizer, num_tensors, first_dims, last_dims, tensor_offsets)
    if tensor.numel():
        _fill(tensor, grouped)
    return grouped


def bgrad_group_quantize(
    tensor: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Tensor | None,
    last_dims: Tensor | None = None,
    tensor_offsets: Tensor | None = None,
) -> tuple[Any, Tensor]:
    """As :func:`group_quantize`; also return sums of each expert's rows, the bias gradients."""
    grouped = _create(tensor, quantizer, num_tensors, first_dims, last_dims, tensor_offsets)
    sums = torch.empty((num_tensors, tensor.shape[1]), dtype=tensor.dtype, device=tensor.device)
    if tensor.numel():
        _fill(tensor, grouped, sums)
    return grouped, sums


def nvfp4_group_quantize_with_amax(
    tensor: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Tensor | None,
    rowwise_amax: Tensor,
    columnwise_amax: Tensor,
    tensor_offsets: Tensor | None = None,
) -> Any:
    """As :func:`group_quantize` in 4 bits, when another kernel has found the largest values."""
    grouped = _create(tensor, quantizer, num_tensors, first_dims, None, tensor_offsets)
    for name, amax in (("amax", rowwise_amax), ("columnwise_amax", columnwise_amax)):
        if getattr(grouped, name) is not None:
            setattr(grouped, name, amax)
    if tensor.numel():
        _cast([tensor, rowwise_amax, columnwise_amax], grouped)
    return grouped


def _create(
    tensor: Tensor,
    quantizer: Any,
    count: int,
    first_dims: Tensor | None,
    last_dims: Tensor | None,
    offsets: Tensor | None,
) -> Any:
    dims = first_dims if first_dims is not None else last_dims
    if offsets is None and dims is not None:
        offsets = splits_to_offsets(dims, tensor.shape[1])
    content = _buffers(quantizer, tensor.shape[0], tensor.shape[1], count)
    is_internal = bool(quantizer.internal)
    module: Any = import_module(_CLASSES[is_internal])
    grouped_class = module.GroupedTensorStorage if is_internal else module.GroupedTensor
    return grouped_class(
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        num_tensors=count,
        quantizer=quantizer,
        first_dims=first_dims,
        last_dims=last_dims,
        tensor_offsets=offsets,
        **content,
    )


def _buffers(quantizer: Any, rows: int, columns: int, count: int) -> dict[str, Any]:
    recipe = recipe_of(quantizer)
    if recipe == CURRENT:
        return _of_whole_tensors(quantizer, rows * columns, count)
    if recipe not in (MXFP8, BLOCKWISE, NVFP4):
        raise NotImplementedError(
            f"prismscale's stand-in for Transformer Engine has no grouped tensors of {recipe}; "
            f"run with the recipe of {CURRENT}, {BLOCKWISE}, {MXFP8} or {NVFP4}"
        )
    n_bytes = rows * columns // (2 if recipe == NVFP4 else 1)
    content: dict[str, Any] = {}
    for prefix, is_wanted in (
        ("", quantizer.rowwise_usage),
        (_COLUMNS, quantizer.columnwise_usage),
    ):
        if is_wanted:
            content[f"{prefix}data"] = empty_as([n_bytes], torch.uint8)
            scales = _scales(quantizer, rows, columns, count, columnwise=prefix == _COLUMNS)
            content[f"{prefix}scale_inv"] = scales
            if recipe == NVFP4:
                content[f"{prefix}amax"] = empty_as([count], torch.float32)
    if recipe in (MXFP8, NVFP4):
        content["with_gemm_swizzled_scales"] = bool(quantizer.optimize_for_gemm)
    return content


def _scales(quantizer: Any, rows: int, columns: int, count: int, *, columnwise: bool) -> Tensor:
    sizes, dtype = scales_of(quantizer, rows, columns, columnwise=columnwise)
    slack = 0
    if columnwise and recipe_of(quantizer) == BLOCKWISE and quantizer.block_scaling_dim == 2:
        slack = 4 * (count - 1) * -(-columns // 128)  # each expert's blocks have their own padding
    return empty_as([math.prod(sizes) + slack], dtype)


def _of_whole_tensors(quantizer: Any, elements: int, count: int) -> dict[str, Any]:
    """Return buffers with one scale per expert, for rows and columns alike."""
    content = {name: empty_as([count], torch.float32) for name in ("scale", "amax")}
    scale_inv = empty_as([count], torch.float32)
    if quantizer.rowwise_usage or multiplies_any_layout():
        content |= {"data": empty_as([elements], torch.uint8), "scale_inv": scale_inv}
    if quantizer.columnwise_usage and not multiplies_any_layout():
        columnwise = empty_as([elements], torch.uint8)
        content |= {"columnwise_data": columnwise, "columnwise_scale_inv": scale_inv}
    return content


def _fill(source: Tensor, grouped: Any, sums: Tensor | None = None) -> None:
    """Launch the kernels that fill the buffers of ``grouped`` and, if given, ``sums``."""
    reads = [source]
    if recipe_of(grouped.quantizer) == CURRENT:
        reads.append(_current_scales(source, grouped))
    elif recipe_of(grouped.quantizer) == NVFP4:
        amaxes = [grouped.amax, grouped.columnwise_amax]
        cost = memory("reduction", launches=2)
        launch(f"{_TE}group_hadamard_transform_amax", cost, reads=[source], writes=amaxes)
    _cast(reads, grouped, sums)


def _cast(reads: Sequence[Tensor], grouped: Any, sums: Tensor | None = None) -> None:
    data = [grouped.rowwise_data, grouped.columnwise_data]
    twice = all(each is not None for each in data)
    writes = [*data, grouped.scale_inv, grouped.columnwise_scale_inv, sums]
    cost = memory("strided_copy" if twice else "copy")
    launch(f"{_TE}group_quantize", cost, reads=reads, writes=writes)


def _current_scales(source: Tensor, grouped: Any) -> Tensor:
    cost = memory("reduction", launches=2)  # the first launch sets the results to zero
    launch(f"{_TE}group_compute_amax", cost, reads=[source], writes=[grouped.amax])
    share_amax(grouped.amax, grouped.quantizer)
    name = f"{_TE}group_compute_scale_from_amax"
    launch(name, memory("pointwise"), reads=[grouped.amax], writes=[grouped.scale])
    scale: Tensor = grouped.scale
    return scale


def grouped_swizzle_for_gemm(tensor: Any, rowwise: bool, columnwise: bool) -> None:
    """Replace the MXFP8 scales of ``tensor`` by the same in the tensor cores' order.

    Scales that were not asked for are removed.
    """
    if recipe_of(tensor.quantizer) != MXFP8 or tensor._with_gemm_swizzled_scales:
        return
    made = _swizzled(tensor, rowwise=rowwise, columnwise=columnwise)
    if made:
        tensor.scale_inv = made.get("scale_inv")
        tensor.columnwise_scale_inv = made.get("columnwise_scale_inv")
        tensor._with_gemm_swizzled_scales = True


def _swizzled(tensor: Any, *, rowwise: bool, columnwise: bool) -> dict[str, Tensor]:
    count = tensor.num_tensors
    rows, columns = tensor.logical_shape[0] // count, tensor.logical_shape[1]
    sizes = {"scale_inv": (rows, columns), "columnwise_scale_inv": (columns, rows)}
    made = {}
    for name, is_wanted in zip(sizes, (rowwise, columnwise), strict=True):
        scales = getattr(tensor, name)
        if is_wanted and scales is not None:
            first, last = mx_scales(*sizes[name], columnwise=False)
            made[name] = empty_as([count * first, last], torch.uint8)
            kernel = f"{_TE}swizzle_grouped_scaling_factors"
            launch(kernel, memory("copy"), reads=[scales], writes=[made[name]])
    return made


def get_grouped_gemm_setup_workspace_size(num_tensors: int) -> int:
    """Return the bytes of the workspace in which a grouped product is set up."""
    pointers = -(-8 * num_tensors // 16) * 16
    # The last array of pointers is not padded.
    arrays = (_POINTERS - 1) * pointers + 8 * num_tensors + _NUMBERS * 4 * num_tensors
    return arrays + _SETUP_ALIGNMENT


def multiply_grouped(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Any,
    bias: Any,
    bias_scale: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    workspace_setup: Tensor,
    workspace_cublas: Tensor,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Any:
    """Run one product for each expert; ``a`` or ``out`` may be a list of tensors. Returns ``out``.

    Whether products are added to the content of ``out`` is stated on the device (``beta``). It is
    assumed if ``out`` has 32 bits, as Megatron's main gradients do.
    """
    count = b.num_tensors
    _, product = product_of(_shape(a, count), transa, _shape(b, count), transb)
    scales = [*_scales_for_product(a, rowwise=transa), *_scales_for_product(b, rowwise=not transb)]
    reads = [*_operand(a, rowwise=transa), *_operand(b, rowwise=not transb)]
    writes = list(out) if isinstance(out, list) else [out.rowwise_data]
    is_added = writes[0].dtype == torch.float32
    if all(product):
        launch(f"{_TE}setup_grouped_gemm", memory("pointwise"), writes=[workspace_setup])
        cost = gemm((count, *product[1:]), bits=_bits(a))
        launch(
            f"{_TE}grouped_gemm", cost, reads=reads + (writes if is_added else []), writes=writes
        )
        if bias is not None:
            added = [bias.rowwise_data, bias_scale, *writes]
            launch(f"{_TE}grouped_bias_add", memory("pointwise"), reads=added, writes=writes)
    del scales
    return out


def _shape(operands: Any, count: int) -> tuple[int, int]:
    """Return the rows and columns of one expert's tensor."""
    if isinstance(operands, list):
        rows, columns = shape_of(operands[0])
        return rows, columns
    rows, columns = operands.logical_shape
    if operands.first_dims is not None:
        known = value_policy.known(operands.first_dims)
        rows = rows if known is None else min(rows, int(known.sum()))
    return rows // count, columns


def _bits(operands: Any) -> int:
    if isinstance(operands, list):
        return bits_of(operands[0])
    return bits_of_quantizer(operands.quantizer)


def _operand(operands: Any, *, rowwise: bool) -> Sequence[Tensor | None]:
    """Return the buffers of the operands that a product reads."""
    if isinstance(operands, list):
        return [buffer for one in operands for buffer in operand(one, rowwise=rowwise)]
    if rowwise or operands.columnwise_data is None:
        return [operands.rowwise_data, operands.scale_inv]
    return [operands.columnwise_data, operands.columnwise_scale_inv]


def _scales_for_product(operands: Any, *, rowwise: bool) -> list[Tensor]:
    """Return MXFP8 scales in the tensor cores' order, for as long as the product runs."""
    if isinstance(operands, list):
        return swizzled_together(operands, rowwise=rowwise)
    if recipe_of(operands.quantizer) != MXFP8 or operands._with_gemm_swizzled_scales:
        return []
    return list(_swizzled(operands, rowwise=rowwise, columnwise=not rowwise).values())


FUNCTIONS = {
    "group_quantize": group_quantize,
    "bgrad_group_quantize": bgrad_group_quantize,
    "nvfp4_group_quantize_with_amax": nvfp4_group_quantize_with_amax,
    "grouped_swizzle_for_gemm": grouped_swizzle_for_gemm,
    "get_grouped_gemm_setup_workspace_size": get_grouped_gemm_setup_workspace_size,
    "te_general_grouped_gemm_for_grouped_tensor": multiply_grouped,
    "te_general_grouped_gemm_for_discrete_in": multiply_grouped,
    "te_general_grouped_gemm_for_discrete_out": multiply_grouped,
}
