"""Rotary embeddings, and softmax kernels of attention that is not fused.

Source: pytorch/csrc/extensions/apply_rope.cpp and softmax.cpp of Transformer Engine 2.11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory
from prismscale.devices.null.libraries.softmax_kernels import softmax_backward, softmax_forward
from prismscale.devices.null.libraries.transformer_engine.quantized_tensors import empty_as

_TE = "transformer_engine::"
_SOFTMAXES = (
    "scaled_softmax",
    "scaled_masked_softmax",
    "scaled_upper_triang_masked_softmax",
    "scaled_aligned_causal_masked_softmax",
)


def _rope(name: str, tensor: Tensor, freqs: Tensor, *_: Any) -> Tensor:
    """Return the rotated tensor, which is contiguous and has the same shape."""
    out = empty_as(tensor.shape, tensor.dtype)
    launch(_TE + name, memory("pointwise"), reads=[tensor, freqs], writes=[out])
    return out


def fused_qkv_rope_forward(
    qkv: Tensor, q_freqs: Tensor, k_freqs: Tensor, starts: Any, sizes: Sequence[int], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries, rotated keys and values; ``sizes`` are a group's widths of these."""
    first, second, groups, _size = qkv.shape
    heads = groups * sizes[0] // sizes[1]
    query = empty_as((first, second, heads, sizes[1]), qkv.dtype)
    key = empty_as((first, second, groups, sizes[1]), qkv.dtype)
    value = empty_as((first, second, groups, sizes[2]), qkv.dtype)
    launch(
        f"{_TE}fused_qkv_rope_forward",
        memory("pointwise"),
        reads=[qkv, q_freqs, k_freqs],
        writes=[query, key, value],
    )
    return query, key, value


def fused_qkv_rope_backward(
    q_grad: Tensor,
    k_grad: Tensor,
    v_grad: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    sizes: Sequence[int],
    *_: Any,
) -> Tensor:
    """Reverse :func:`fused_qkv_rope_forward` for gradients."""
    grads, total = (q_grad, k_grad, v_grad), sum(sizes)
    groups = sum(grad.shape[2] for grad in grads) * q_grad.shape[3] // total
    out = empty_as((*q_grad.shape[:2], groups, total), q_grad.dtype)
    launch(
        f"{_TE}fused_qkv_rope_backward",
        memory("pointwise"),
        reads=[*grads, q_freqs, k_freqs],
        writes=[out],
    )
    return out


def _softmax(name: str, scores: Tensor, *rest: Any) -> Tensor:
    """Return probabilities; ``rest`` is a mask, if there is one, and the scale."""
    mask = rest[0] if isinstance(rest[0], Tensor) else None
    return softmax_forward(f"{_TE}{name}_forward", scores, mask)


def _softmax_gradient(name: str, grad: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    return softmax_backward(f"{_TE}{name}_backward", grad, probabilities)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fused_rope_forward": partial(_rope, "fused_rope_forward"),
    "fused_rope_backward": partial(_rope, "fused_rope_backward"),
    "fused_qkv_rope_forward": fused_qkv_rope_forward,
    "fused_qkv_rope_backward": fused_qkv_rope_backward,
    **{f"{name}_forward": partial(_softmax, name) for name in _SOFTMAXES},
    **{f"{name}_backward": partial(_softmax_gradient, name) for name in _SOFTMAXES},
}
