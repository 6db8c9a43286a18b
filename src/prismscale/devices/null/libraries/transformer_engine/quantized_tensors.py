"""Quantized tensors as the extension makes them: their buffers, and the buffers' shapes.

The classes are the library's own; the extension only allocates their buffers. On GPUs whose tensor
cores multiply 8-bit floats in one layout only (Hopper), the buffer that is used column by column is
a transposed copy. For 4-bit floats it is one on every GPU. Source: pytorch/csrc/quantizer.cpp of
Transformer Engine 2.11 to 2.18.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries.transformer_engine.enums import Float8BlockScaleTensorFormat
from prismscale.devices.null.libraries.transformer_engine.versions import is_since

_TENSORS = "transformer_engine.pytorch.tensor."
_BLOCK = 128
_MX_BLOCK = 32
_FP4_BLOCK, _FP4_ROWS = 16, 64
"""Numbers that share one scale; a kernel that rotates takes a multiple of this many rows."""
_BUFFERS = (
    "_data",
    "_transpose",
    "_rowwise_data",
    "_columnwise_data",
    "_rowwise_scale_inv",
    "_columnwise_scale_inv",
    "_amax_rowwise",
    "_amax_columnwise",
)
"""Buffer attributes of quantized tensors; tensors with a single scale have the first two."""
_GEMM_READY = Float8BlockScaleTensorFormat["GEMM_READY"]
DELAYED, CURRENT = "Float8Quantizer", "Float8CurrentScalingQuantizer"
BLOCKWISE, MXFP8 = "Float8BlockQuantizer", "MXFP8Quantizer"
NVFP4 = "NVFP4Quantizer"


def recipe_of(quantizer: Any) -> str:
    """Return the name of the quantizer's class; empty for None.

    Raises:
        NotImplementedError: this stand-in does not know the quantizer's tensors.
    """
    if quantizer is None:
        return ""
    name = type(quantizer).__name__
    if name not in (DELAYED, CURRENT, BLOCKWISE, MXFP8, NVFP4):
        raise NotImplementedError(
            f"prismscale's stand-in for Transformer Engine knows the quantizers {DELAYED}, "
            f"{CURRENT}, {BLOCKWISE}, {MXFP8} and {NVFP4}, not {name}; run with one of their "
            "recipes"
        )
    return name


def is_quantized(tensor: Any) -> bool:
    """Return whether ``tensor`` is one of the library's quantized tensors."""
    return hasattr(tensor, "_fp8_dtype") or hasattr(tensor, "_fp4_dtype")


def bits_of(tensor: Any) -> int:
    """Return the bits of the floats that the tensor cores multiply."""
    if hasattr(tensor, "_fp4_dtype"):
        return 4
    return 8 if is_quantized(tensor) else 16


def bits_of_quantizer(quantizer: Any) -> int:
    """Return the bits of the floats that ``quantizer`` makes; 16 for None."""
    recipe = recipe_of(quantizer)
    if recipe == NVFP4:
        return 4
    return 8 if recipe else 16


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a plain tensor, or that of a quantized one from its buffers."""
    if isinstance(tensor, Tensor):
        return tuple(tensor.shape)
    if hasattr(tensor, "_fp4_dtype"):
        return _shape_of_fp4(tensor)
    rows = tensor._data if hasattr(tensor, "_data") else tensor._rowwise_data
    if rows is not None:
        return tuple(rows.shape)
    columns = tensor._transpose if hasattr(tensor, "_transpose") else tensor._columnwise_data
    is_transposed = hasattr(tensor, "_transpose") or (
        hasattr(tensor, "_is_2D_scaled")
        # Up to 2.11, tensors scaled by blocks can also be compact.
        and getattr(tensor, "_data_format", _GEMM_READY) == _GEMM_READY
    )
    shape = tuple(columns.shape)
    return (*shape[1:], shape[0]) if is_transposed else shape


def _shape_of_fp4(tensor: Any) -> tuple[int, ...]:
    if tensor._rowwise_data is not None:
        *rows, last = tensor._rowwise_data.shape
        return (*rows, 2 * last)
    first, *rest, last = tensor._columnwise_data.shape
    return (*rest, 2 * last, first)


def empty_as(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return what ``at::empty`` gives on the current device."""
    return torch.empty(tuple(shape), dtype=dtype, device="cuda")


def multiplies_any_layout() -> bool:
    """Return whether 8-bit products take operands in every layout: since Blackwell, except 12.x."""
    major, minor = torch.cuda.get_device_capability()
    return 100 <= 10 * major + minor < 120 or 10 * major + minor >= 130


def buffers(tensor: Any) -> list[Tensor]:
    """Return all buffers of a tensor, including scales."""
    if not is_quantized(tensor):
        return [tensor]
    found = (getattr(tensor, name, None) for name in (*_BUFFERS, "_scale_inv"))
    return [buffer for buffer in found if buffer is not None]


def operand(tensor: Any, *, rowwise: bool) -> list[Tensor]:
    """Return the buffers of ``tensor`` that a product reads along its rows, or its columns."""
    if not is_quantized(tensor):
        return [tensor]
    if hasattr(tensor, "_scale_inv"):
        use_data = rowwise or tensor._transpose is None
        return [tensor._data if use_data else tensor._transpose, tensor._scale_inv]
    if rowwise:
        return [tensor._rowwise_data, tensor._rowwise_scale_inv]
    return [tensor._columnwise_data, tensor._columnwise_scale_inv]


def create(quantizer: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return an empty tensor as ``quantizer`` wants it; a plain one if that is None."""
    recipe, shape = recipe_of(quantizer), tuple(shape)
    if not recipe:
        return empty_as(shape, dtype)
    if recipe in (DELAYED, CURRENT):
        return _per_tensor(quantizer, shape, dtype, recipe)
    return _by_blocks(quantizer, shape, dtype, recipe)


def _transposed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[-1:], *shape[:-1])


def _per_tensor(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype, recipe: str) -> Any:
    scale = empty_as([1], torch.float32) if recipe == DELAYED else None
    any_layout = multiplies_any_layout()
    data = transpose = None
    if quantizer.rowwise_usage or any_layout:
        data = empty_as(shape, torch.uint8)
    if quantizer.columnwise_usage and not any_layout:
        transpose = empty_as(_transposed(shape), torch.uint8)
    return _instance(
        quantizer,
        "float8_tensor",
        "Float8Tensor",
        shape,
        dtype,
        data=data,
        fp8_scale_inv=empty_as([1], torch.float32) if scale is None else scale,
        data_transpose=transpose,
    )


def _by_blocks(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype, recipe: str) -> Any:
    content: dict[str, Any] = {}
    for usage in ("rowwise", "columnwise"):
        wanted = getattr(quantizer, f"{usage}_usage")
        data, scale = _block_buffers(quantizer, shape, recipe, usage) if wanted else (None, None)
        content |= {f"{usage}_data": data, f"{usage}_scale_inv": scale}
    if recipe == NVFP4:
        return _fp4(quantizer, shape, dtype, content)
    if recipe == MXFP8:
        content["with_gemm_swizzled_scales"] = bool(getattr(quantizer, "optimize_for_gemm", False))
        return _instance(quantizer, "mxfp8_tensor", "MXFP8Tensor", shape, dtype, **content)
    return _instance(
        quantizer,
        "float8_blockwise_tensor",
        "Float8BlockwiseQTensor",
        shape,
        dtype,
        is_2D_scaled=quantizer.block_scaling_dim == 2,
        data_format=Float8BlockScaleTensorFormat(int(_is_compact(quantizer))),
        **content,
    )


def _fp4(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype, content: Any) -> Any:
    for usage in ("rowwise", "columnwise"):
        wanted = content[f"{usage}_data"] is not None
        content[f"amax_{usage}"] = empty_as([1], torch.float32) if wanted else None
    wants_order = bool(getattr(quantizer, "optimize_for_gemm", False))
    content |= {
        "fp4_dtype": quantizer.dtype,
        "with_gemm_swizzled_scales": wants_order and rotates_in_one_kernel(quantizer, shape),
        "row_scaled_nvfp4": bool(getattr(quantizer, "row_scaled_nvfp4", False)),
        "nvfp4_use_4over6": bool(getattr(quantizer, "nvfp4_use_4over6", False)),
        "nvfp4_e4m3_max": getattr(quantizer, "nvfp4_e4m3_max", 448),
    }
    return _instance(quantizer, "nvfp4_tensor", "NVFP4Tensor", shape, dtype, **content)


def rotates_in_one_kernel(quantizer: Any, shape: Sequence[int]) -> bool:
    """Return whether NVFP4's random rotation of columns is part of the cast on the GPU at hand."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    return bool(
        quantizer.with_rht
        and rows % _FP4_ROWS == 0
        and columns % _BLOCK == 0
        and multiplies_any_layout()
    )


def _block_buffers(
    quantizer: Any, shape: tuple[int, ...], recipe: str, usage: str
) -> tuple[Tensor, Tensor]:
    rows, columns = math.prod(shape[:-1]), shape[-1]
    columnwise = usage == "columnwise"
    compact = recipe == BLOCKWISE and _is_compact(quantizer)
    data = shape
    if recipe == NVFP4:
        data = (columns, rows // 2) if columnwise else (*shape[:-1], columns // 2)
    elif recipe == BLOCKWISE and columnwise and not compact:
        data = _transposed(shape)
    sizes, dtype = scales_of(quantizer, rows, columns, columnwise=columnwise, compact=compact)
    return empty_as(data, torch.uint8), empty_as(sizes, dtype)


def scales_of(
    quantizer: Any, rows: int, columns: int, *, columnwise: bool, compact: bool = False
) -> tuple[tuple[int, int], torch.dtype]:
    """Return the shape and element type of the block scales of a matrix."""
    recipe = recipe_of(quantizer)
    if recipe == MXFP8:
        return mx_scales(rows, columns, columnwise=columnwise), torch.uint8
    if recipe == NVFP4:
        across, along = (columns, rows) if columnwise else (rows, columns)
        return fp4_scales(across, along), torch.uint8
    dims = quantizer.block_scaling_dim
    sizes = block_scales(rows, columns, columnwise=columnwise, dims=dims, compact=compact)
    return sizes, torch.float32


def _is_compact(quantizer: Any) -> bool:
    """Return whether other ranks gather the tensor before they multiply it."""
    return bool(getattr(quantizer, "all_gather_usage", False))


def mx_scales(rows: int, columns: int, *, columnwise: bool) -> tuple[int, int]:
    """Return the shape of MXFP8's scales, one byte for 32 elements.

    They are padded to tiles of 128 × 4, or of 4 × 128 if ``columnwise``.
    """
    if columnwise:
        return _up(rows // _MX_BLOCK, 4), _up(columns, 128)
    return _up(rows, 128), _up(columns // _MX_BLOCK, 4)


def fp4_scales(across: int, along: int) -> tuple[int, int]:
    """Return the shape of NVFP4's scales, one byte for 16 numbers ``along``.

    They are padded to tiles of 128 × 4.
    """
    return _up(across, 128), _up(along // _FP4_BLOCK, 4)


def block_scales(
    rows: int, columns: int, *, columnwise: bool, dims: int, compact: bool
) -> tuple[int, int]:
    """Return the shape of the scales of blocks, one float32 for each block.

    A block has 128 (``dims`` 1) or 128 × 128 (``dims`` 2) elements.
    """
    along_rows, along_columns = -(-rows // _BLOCK), -(-columns // _BLOCK)
    if dims == 2:
        first, last = (along_columns, along_rows) if columnwise else (along_rows, along_columns)
        return first, _up(last, 4)
    if columnwise:
        return along_rows, columns if compact else _up(columns, 4)
    return (rows, along_columns) if compact else (along_columns, _up(rows, 4))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _instance(
    quantizer: Any,
    module: str,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    **content: Any,
) -> Any:
    content |= {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "fake_dtype": dtype}
    if quantizer.internal:
        folder, base = ("storage", "storage") if is_since(2, 9) else ("_internal", "base")
        storage: Any = import_module(f"{_TENSORS}{folder}.{module}_{base}")
        return _made(getattr(storage, f"{name}{base.title()}"), content)
    tensors: Any = import_module(f"{_TENSORS}{module}")
    content |= {
        "shape": shape,
        "dtype": dtype,
        "device": torch.device("cuda", torch.cuda.current_device()),
    }
    return _made(getattr(tensors, name), content)


def _made(tensor_class: Any, content: dict[str, Any]) -> Any:
    """Return an instance; the part of ``content`` that its class takes depends on the version."""
    return tensor_class(**{key: content[key] for key in content.keys() & _parameters(tensor_class)})


@cache
def _parameters(tensor_class: Any) -> frozenset[str]:
    """Return the names of arguments that a class takes, including those of its base classes."""
    makers = (getattr(base, "__new__", None) for base in tensor_class.__mro__)
    found: set[str] = set()
    for maker in makers:
        if inspect.isfunction(maker):
            found |= inspect.signature(maker).parameters.keys()
    return frozenset(found)


def update(quantizer: Any, tensor: Any) -> None:
    """Give an existing tensor the buffers that ``quantizer`` wants now, and remove the others."""
    wanted = create(quantizer, shape_of(tensor), torch.float32)
    for name in _BUFFERS:
        new = getattr(wanted, name, None)
        if hasattr(tensor, name) and (new is None or getattr(tensor, name) is None):
            setattr(tensor, name, new)
    if hasattr(tensor, "_transpose_invalid"):
        tensor._transpose_invalid = tensor._transpose is None
