"""Casts of NVFP4 weights from the masters that a distributed optimizer shards, and transposes.

Source: pytorch/csrc/extensions/nvfp4_2d_partial_cast.cpp and transpose.cpp of Transformer Engine
2.18.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory
from prismscale.devices.null.libraries.transformer_engine.quantized_tensors import empty_as

_TE = "transformer_engine::"
Tensors = Sequence[Tensor]


def nvfp4_multi_tensor_compute_partial_amax(
    masters: Tensors, of_blocks: Tensors, of_weights: Tensors, *_: Any
) -> None:
    """Compute the largest magnitudes of each block and each weight in the parts that a rank has."""
    writes = [*of_blocks, *of_weights]
    cost = memory("foreach_reduction")
    launch(f"{_TE}nvfp4_compute_partial_amax", cost, reads=masters, writes=writes)


def nvfp4_compute_global_scale(amaxes: Tensor, scales: Tensor) -> None:
    """Compute the global scale of each weight."""
    cost = memory("pointwise")
    launch(f"{_TE}nvfp4_compute_global_scale", cost, reads=[amaxes], writes=[scales])


def nvfp4_multi_tensor_fused_scale(
    of_blocks: Tensors,
    of_weights: Tensors,
    decoding: Tensors,
    scales: Tensors,
    amaxes: Tensors,
    *_: Any,
) -> None:
    """Compute scales of blocks, and expand them as the weights have them.

    The weights have a row of scales for each of a block's 16 rows.
    """
    cost = memory("foreach")
    reads, writes = [*of_blocks, *of_weights], [*decoding, *scales, *amaxes]
    launch(f"{_TE}nvfp4_fused_scale", cost, reads=reads, writes=writes)


def nvfp4_multi_tensor_2d_partial_cast(
    masters: Tensors, parts: Tensors, decoding: Tensors, of_weights: Tensors, *_: Any
) -> None:
    """Cast the parts of the weights that a rank has to two numbers per byte."""
    reads = [*masters, *decoding, *of_weights]
    launch(f"{_TE}nvfp4_2d_partial_cast", memory("foreach"), reads=reads, writes=parts)


def nvfp4_data_transpose(data: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Transpose (M, K / 2) bytes to (K, M / 2)."""
    rows, half = data.numel() // data.shape[-1], data.shape[-1]
    if out is None:
        out = empty_as((2 * half, rows // 2), torch.uint8)
    launch(f"{_TE}nvfp4_transpose", memory("strided_copy"), reads=[data], writes=[out])
    return out


def nvfp4_2d_scale_transpose(scales: Tensor, out: Tensor, *_: Any) -> None:
    """Transpose the scales of square blocks."""
    launch(f"{_TE}nvfp4_scale_transpose", memory("strided_copy"), reads=[scales], writes=[out])


def nvfp4_2d_multi_tensor_transpose(
    data: Tensors, out: Tensors, scales: Tensors, out_scales: Tensors, *_: Any
) -> None:
    """Transpose data and scales of many weights."""
    reads, writes = [*data, *scales], [*out, *out_scales]
    launch(f"{_TE}nvfp4_multi_transpose", memory("strided_copy"), reads=reads, writes=writes)


FUNCTIONS = {
    "nvfp4_multi_tensor_compute_partial_amax": nvfp4_multi_tensor_compute_partial_amax,
    "nvfp4_compute_global_scale": nvfp4_compute_global_scale,
    "nvfp4_multi_tensor_fused_scale": nvfp4_multi_tensor_fused_scale,
    "nvfp4_multi_tensor_2d_partial_cast": nvfp4_multi_tensor_2d_partial_cast,
    "nvfp4_data_transpose": nvfp4_data_transpose,
    "nvfp4_2d_scale_transpose": nvfp4_2d_scale_transpose,
    "nvfp4_2d_multi_tensor_transpose": nvfp4_2d_multi_tensor_transpose,
}
