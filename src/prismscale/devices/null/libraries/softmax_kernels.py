"""Fused softmax of attention scores: Apex's kernels, which Transformer Engine took over.

The forward pass computes probabilities. The backward pass writes the gradient of the scores into
the memory of the gradient that it is given. Source: csrc/megatron/scaled_*softmax* in Apex;
pytorch/csrc/extensions/softmax.cpp of Transformer Engine 2.11.
"""

from __future__ import annotations

from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory

_LONG = 1024
"""Most elements of a row that one warp keeps in registers."""


def softmax_forward(kernel: str, scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Launch ``kernel``; return probabilities of ``scores`` (batch, heads, queries, keys)."""
    scores = scores.contiguous()
    out = scores.new_empty(scores.shape)
    kind = "long_softmax" if scores.shape[-1] > _LONG else "softmax"
    launch(kernel, memory(kind), reads=[scores, mask], writes=[out])
    return out


def softmax_backward(kernel: str, grad: Tensor, probabilities: Tensor) -> Tensor:
    """Return the gradient of the scores, in the memory of ``grad`` if that is contiguous."""
    grad, probabilities = grad.contiguous(), probabilities.contiguous()
    launch(kernel, memory("softmax_backward"), reads=[grad, probabilities], writes=[grad])
    return grad
