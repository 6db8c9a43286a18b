"""LayerNorm and RMSNorm.

Source: pytorch/csrc/extensions/normalization.cpp of Transformer Engine 2.11. The backward pass has
a workspace of partial sums for the gradients of the weights: one row of float32 for each thread
block. There is one thread block per multiprocessor.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory
from prismscale.devices.null.libraries.transformer_engine.casts import (
    cast_into,
    fp8_transpose,
    unquantized_with_amax,
)
from prismscale.devices.null.libraries.transformer_engine.enums import torch_dtype
from prismscale.devices.null.libraries.transformer_engine.quantized_tensors import (
    CURRENT,
    DELAYED,
    buffers,
    create,
    empty_as,
    recipe_of,
)

_TE = "transformer_engine::"


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Return output, mean and inverse deviation."""
    rows = math.prod(x.shape[:-1])
    mean, deviation = empty_as([rows], torch.float32), empty_as([rows], torch.float32)
    out = _forward("layernorm_fwd", [x, weight, bias], [mean, deviation], out, quantizer, dtype)
    return [out, mean, deviation]


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Return output, None and inverse deviation."""
    deviation = empty_as([math.prod(x.shape[:-1])], torch.float32)
    out = _forward("rmsnorm_fwd", [x, weight], [deviation], out, quantizer, dtype)
    return [out, None, deviation]


def _forward(
    name: str,
    reads: list[Any],
    statistics: list[Tensor],
    out: Any,
    quantizer: Any,
    dtype: Any,
) -> Any:
    x = reads[0]
    if out is None:
        out = create(quantizer, x.shape, torch_dtype(dtype))
    recipe = recipe_of(quantizer)
    if recipe in ("", DELAYED):
        columns = getattr(out, "_transpose", None) if recipe else None
        writes = [buffer for buffer in buffers(out) if buffer is not columns]
        launch(_TE + name, memory("fused_norm"), reads=reads, writes=[*writes, *statistics])
        if columns is not None:
            fp8_transpose(out._data, dtype, out=columns)
        return out
    fuses_amax = recipe == CURRENT and os.environ.get("NVTE_NORM_FWD_USE_CUDNN", "0") == "0"
    amax = None
    if fuses_amax:
        result, amax = unquantized_with_amax(quantizer, x.shape, torch_dtype(dtype))
    else:
        result = empty_as(x.shape, torch_dtype(dtype))
    launch(_TE + name, memory("fused_norm"), reads=reads, writes=[result, *statistics])
    cast_into(result, out, quantizer, amax=amax)
    return out


def layernorm_bwd(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    deviation: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """Return the gradients of input, weight and bias."""
    reads = [grad, x, mean, deviation, weight]
    return _backward("layernorm_bwd", reads, sm_margin, parameters=2)


def rmsnorm_bwd(
    grad: Tensor,
    x: Tensor,
    deviation: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """Return the gradients of input and weight."""
    return _backward("rmsnorm_bwd", [grad, x, deviation, weight], sm_margin, parameters=1)


def rmsnorm_bwd_add(
    grad: Tensor,
    x: Tensor,
    add: Tensor,
    deviation: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor]:
    """As :func:`rmsnorm_bwd`, with ``add`` added to the gradient of the input."""
    reads = [grad, x, deviation, add, weight]
    return _backward("rmsnorm_bwd_add", reads, sm_margin, parameters=1)


def _backward(name: str, reads: list[Tensor], sm_margin: int, *, parameters: int) -> list[Tensor]:
    reads = [tensor.contiguous() for tensor in reads]
    x, weight = reads[1], reads[-1]
    grads = [torch.empty_like(x), *(torch.empty_like(weight) for _ in range(parameters))]
    blocks = torch.cuda.get_device_properties(x.device).multi_processor_count - sm_margin
    workspace = empty_as([parameters * blocks * weight.numel() * 4], torch.uint8)
    launch(_TE + name, memory("fused_norm_backward"), reads=reads, writes=[*grads, workspace])
    return grads


FUNCTIONS = {
    "layernorm_fwd": layernorm_fwd,
    "layernorm_bwd": layernorm_bwd,
    "rmsnorm_fwd": rmsnorm_fwd,
    "rmsnorm_bwd": rmsnorm_bwd,
    "rmsnorm_bwd_add": rmsnorm_bwd_add,
}
