"""Fused softmax of attention scores, as Apex has it and Transformer Engine took it over.

The forward pass makes probabilities; the backward pass leaves the gradient in the memory of the
one that it is given. Source: csrc/megatron/scaled_*softmax* in Apex;
pytorch/csrc/extensions/softmax.cpp of Transformer Engine 2.11.
"""

from __future__ import annotations

from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory

_LONG = 1024
"""Elements of a row that one warp keeps in registers."""


def softmax_forward(kernel: str, scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Probabilities of ``scores`` (batch, heads, queries, keys), by the kernel of that name."""
    scores = scores.contiguous()
    out = scores.new_empty(scores.shape)
    kind = "long_softmax" if scores.shape[-1] > _LONG else "softmax"
    launch(kernel, memory(kind), reads=[scores, mask], writes=[out])
    return out


def softmax_backward(kernel: str, grad: Tensor, probabilities: Tensor) -> Tensor:
    """Gradient of the scores, in the memory of ``grad`` if that is contiguous."""
    grad, probabilities = grad.contiguous(), probabilities.contiguous()
    launch(kernel, memory("softmax_backward"), reads=[grad, probabilities], writes=[grad])
    return grad
