"""Tokens on their way to experts: the router's kernels, permutation and padding.

Source: pytorch/csrc/extensions/router.cpp, permutation.cpp and padding.cpp of Transformer Engine
2.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory
from prismscale.devices.null.libraries.token_permutation import (
    permute,
    unpermute,
    unpermute_backward,
)
from prismscale.devices.null.libraries.transformer_engine.quantized_tensors import empty_as

_TE = "transformer_engine::"


def fused_topk_with_score_function_fwd(
    logits: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, map of routes, and scores."""
    probs = empty_as(logits.shape, logits.dtype)
    routes = empty_as(logits.shape, torch.bool)
    scores = empty_as(logits.shape, logits.dtype)
    writes = [probs, routes, scores]
    launch(f"{_TE}fused_topk_fwd", memory("softmax"), reads=[logits], writes=writes)
    return probs, routes, scores


def fused_topk_with_score_function_bwd(
    tokens: int, experts: int, routes: Tensor, scores: Tensor, grad: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Gradient of the logits."""
    out = empty_as((tokens, experts), scores.dtype)
    reads = [routes, scores, grad]
    launch(f"{_TE}fused_topk_bwd", memory("softmax_backward"), reads=reads, writes=[out])
    return out


def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, map of routes, and what the backward pass needs."""
    return fused_topk_with_score_function_fwd(logits)


def fused_score_for_moe_aux_loss_bwd(
    tokens: int, experts: int, scores: Tensor, grad: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Gradient of the logits."""
    out = empty_as((tokens, experts), scores.dtype)
    reads = [scores, grad]
    launch(f"{_TE}fused_score_bwd", memory("softmax_backward"), reads=reads, writes=[out])
    return out


def fused_moe_aux_loss_fwd(
    probs: Tensor, tokens_per_expert: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """The loss, and a constant for its gradient."""
    loss, constant = empty_as((), probs.dtype), empty_as((), torch.float32)
    launch(
        f"{_TE}fused_moe_aux_loss_fwd",
        memory("reduction"),
        reads=[probs, tokens_per_expert],
        writes=[loss, constant],
    )
    return loss, constant


def fused_moe_aux_loss_bwd(
    constant: Tensor, tokens_per_expert: Tensor, rows: int, columns: int, grad: Tensor
) -> Tensor:
    """Gradient of the probabilities."""
    out = empty_as((rows, columns), grad.dtype)
    reads = [constant, tokens_per_expert, grad]
    launch(f"{_TE}fused_moe_aux_loss_bwd", memory("pointwise"), reads=reads, writes=[out])
    return out


def moe_permute_fwd(
    tokens: Tensor,
    dtype: Any,
    indices: Tensor,
    out_tokens: int,
    workspace: Sequence[Tensor],
    most_tokens: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """As :func:`~prismscale.devices.null.libraries.token_permutation.permute`."""
    return permute("transformer_engine", tokens, indices, out_tokens, workspace, most_tokens)


def moe_unpermute_fwd(
    tokens: Tensor, dtype: Any, places: Tensor, probs: Tensor, count: int, topk: int
) -> Tensor:
    """The sum of each token's copies, weighted."""
    return unpermute("transformer_engine", tokens, places, probs, count)


def moe_unpermute_bwd(
    grad: Tensor, tokens: Tensor, dtype: Any, places: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the copies and of their weights."""
    return unpermute_backward("transformer_engine", grad, tokens, places, probs)


def fused_multi_row_padding(tensor: Tensor, out: Tensor, *_: Any) -> None:
    """Each expert's rows, and zeros up to a multiple."""
    launch(f"{_TE}multi_padding", memory("copy"), reads=[tensor], writes=[out])


def fused_multi_row_unpadding(tensor: Tensor, out: Tensor, *_: Any) -> None:
    """Each expert's rows without them."""
    launch(f"{_TE}multi_unpadding", memory("copy"), reads=[tensor], writes=[out])


FUNCTIONS = {
    "fused_topk_with_score_function_fwd": fused_topk_with_score_function_fwd,
    "fused_topk_with_score_function_bwd": fused_topk_with_score_function_bwd,
    "fused_score_for_moe_aux_loss_fwd": fused_score_for_moe_aux_loss_fwd,
    "fused_score_for_moe_aux_loss_bwd": fused_score_for_moe_aux_loss_bwd,
    "fused_moe_aux_loss_fwd": fused_moe_aux_loss_fwd,
    "fused_moe_aux_loss_bwd": fused_moe_aux_loss_bwd,
    "moe_permute_fwd": moe_permute_fwd,
    "moe_permute_bwd": moe_unpermute_fwd,
    "moe_unpermute_fwd": moe_unpermute_fwd,
    "moe_unpermute_bwd": moe_unpermute_bwd,
    "fused_multi_row_padding": fused_multi_row_padding,
    "fused_multi_row_unpadding": fused_multi_row_unpadding,
}
