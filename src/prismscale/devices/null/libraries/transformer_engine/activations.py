"""Activation functions, their gradients, and dropout.

Source: pytorch/csrc/extensions/activation.cpp, bias.cpp and dropout.cpp of Transformer Engine 2.11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory
from prismscale.devices.null.libraries.transformer_engine.casts import (
    cast_into,
    unquantized_with_amax,
)
from prismscale.devices.null.libraries.transformer_engine.quantized_tensors import (
    BLOCKWISE,
    CURRENT,
    DELAYED,
    MXFP8,
    buffers,
    create,
    empty_as,
    multiplies_any_layout,
    recipe_of,
    shape_of,
)

_TE = "transformer_engine::"
_GATED = ("glu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu")
_PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
_WITH_BIAS = ("gelu", "silu", "relu", "qgelu", "srelu")


def _activation(name: str, x: Tensor, quantizer: Any, *_: Any, **__: Any) -> Any:
    """Apply ``name`` to ``x``; a gated function returns the product of two halves."""
    x = x.contiguous()
    shape = (*x.shape[:-1], x.shape[-1] // (2 if name in _GATED else 1))
    return _fused(name, [x], shape, x.dtype, quantizer)


def _gradient(name: str, grad: Tensor, x: Tensor, quantizer: Any, *_: Any, **__: Any) -> Any:
    """Return the gradient of the input ``x`` of ``name``."""
    grad, x = grad.contiguous(), x.contiguous()
    return _fused(_gradient_name(name), [grad, x], x.shape, x.dtype, quantizer)


def _gradient_name(name: str) -> str:
    prefix, underscore, function = name.rpartition("_")
    return f"{prefix}{underscore}d{function}"


def _fused(
    name: str, reads: list[Tensor], shape: Sequence[int], dtype: torch.dtype, quantizer: Any
) -> Any:
    """Launch a kernel that also casts its result, if there is one; otherwise cast it afterwards."""
    out = create(quantizer, shape, dtype)
    recipe = recipe_of(quantizer)
    if recipe in ("", DELAYED, MXFP8):
        launch(_TE + name, memory("pointwise"), reads=reads, writes=buffers(out))
        return out
    amax = None
    if recipe == CURRENT:
        result, amax = unquantized_with_amax(quantizer, shape, dtype)
    else:
        result = empty_as(shape, dtype)
    launch(_TE + name, memory("pointwise"), reads=reads, writes=[result])
    cast_into(result, out, quantizer, amax=amax)
    return out


def bgrad_quantize(grad: Tensor, quantizer: Any) -> list[Any]:
    """Return the gradient of a bias, and ``grad`` cast."""
    grad = grad.contiguous()
    bias_grad = empty_as(grad.shape[-1:], grad.dtype)
    if quantizer is None:
        torch.sum(grad.reshape(-1, grad.shape[-1]), dim=0, out=bias_grad)
        return [bias_grad, grad]
    out = create(quantizer, grad.shape, grad.dtype)
    recipe = recipe_of(quantizer)
    both = quantizer.rowwise_usage and quantizer.columnwise_usage
    if recipe == MXFP8 or (recipe == DELAYED and (multiplies_any_layout() or both)):
        writes = [*buffers(out), bias_grad]
        launch(f"{_TE}quantize_dbias", memory("strided_copy"), reads=[grad], writes=writes)
        return [bias_grad, out]
    torch.sum(grad.reshape(-1, grad.shape[-1]), dim=0, out=bias_grad)
    cast_into(grad, out, quantizer)
    return [bias_grad, out]


def _gradient_with_bias(name: str, grad: Tensor, x: Tensor, quantizer: Any) -> list[Any]:
    """Return the gradients of the bias before ``name`` and of its input, which is cast."""
    recipe = recipe_of(quantizer)
    if recipe in (CURRENT, BLOCKWISE):
        out = _gradient(name, grad, x, None)
        return bgrad_quantize(out, quantizer)
    grad, x = grad.contiguous(), x.contiguous()
    out = create(quantizer, x.shape, grad.dtype)
    bias_grad = empty_as(x.shape[-1:], grad.dtype)
    writes = [*buffers(out), bias_grad]
    launch(f"{_TE}dbias_d{name}", memory("pointwise"), reads=[grad, x], writes=writes)
    return [bias_grad, out]


def dropout_fwd(x: Any, probability: float, out: Tensor | None = None) -> list[Tensor]:
    """Return the output, and a mask of one bit per element."""
    if out is None:
        out = empty_as(shape_of(x), x.dtype)
    mask = empty_as([out.numel() // 8], torch.uint8)
    state = empty_as([2], torch.int64)
    launch(f"{_TE}dropout_fwd", memory("dropout"), reads=[*buffers(x), state], writes=[out, mask])
    return [out, mask]


def dropout_bwd(
    grad: Tensor, mask: Tensor, probability: float, grad_input: Tensor | None = None
) -> Tensor:
    """Return the gradient of the input."""
    if grad_input is None:
        grad_input = torch.empty_like(grad)
    launch(f"{_TE}dropout_bwd", memory("dropout"), reads=[grad, mask], writes=[grad_input])
    return grad_input


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: partial(_activation, name) for name in (*_PLAIN, *_GATED)},
    **{_gradient_name(name): partial(_gradient, name) for name in (*_PLAIN, *_GATED)},
    **{f"dbias_d{name}": partial(_gradient_with_bias, name) for name in _WITH_BIAS},
    "bgrad_quantize": bgrad_quantize,
    "dropout_fwd": dropout_fwd,
    "dropout_bwd": dropout_bwd,
}
