"""What Transformer Engine's layers keep in memory where megatron-core's local ones differ.

Transformer Engine cannot be built without CUDA. ``install`` once megatron-core is imported and
before the model is built: its local layers then allocate and keep what the others would.

- Matrix multiplications have a workspace of their own, which stays: 32 MiB on Hopper.
- Gathered activations and attention scores are allocated when they are needed; the local layers
  share one buffer, which stays.
- Rotary embedding is one kernel, which keeps its angles alone.
- Fused attention (cuDNN's) reads queries, keys and values where the projection wrote them, or makes
  each contiguous where something came between. It keeps them, the output and one float32 a row.

The copies after a rotary embedding and the scores' own buffers were inferred from the records (of
one and of two layouts); the rest was known before they were compared.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor, nn

ATTENTIONS = ("fused", "unfused")
_workspaces: list[Tensor] = []


def install(attention: str) -> None:
    """Make local layers keep what Transformer Engine's do, with one of :data:`ATTENTIONS`."""
    _workspaces.append(torch.empty(32 << 20, dtype=torch.uint8, device="cuda"))
    GlobalMemoryBuffer.get_tensor = _allocate
    rope_utils.fused_apply_rotary_pos_emb = lambda t, freqs, **_: _FusedRotary.apply(t, freqs)
    if attention == "fused":
        LocalSpecProvider.core_attention = lambda self: FusedAttention


def _allocate(
    buffer: Any, shape: tuple[int, ...], dtype: torch.dtype, name: str, context: Any = None
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


class FusedAttention(nn.Module):
    """Core attention over ``[sequence, batch, heads, head size]``."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Flattens heads, as the layer's output projection expects."""
        if query.untyped_storage()._cdata != value.untyped_storage()._cdata:
            query, key, value = (tensor.contiguous() for tensor in (query, key, value))
        return _FusedAttention.apply(query, key, value).flatten(2)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(query.shape)
        rows = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return tuple(torch.empty_like(tensor) for tensor in (query, key, value))


class _FusedRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rotated: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return rotated.new_empty(rotated.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.new_empty(gradient.shape), None
