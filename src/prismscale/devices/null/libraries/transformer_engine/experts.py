"""Tokens on their way to experts: the router's kernels, permutation and padding.

The permutation by indices sorts them; the sort's own storage is estimated as CUB's radix sort of
pairs takes it, a second copy of both arrays. Source: pytorch/csrc/extensions/router.cpp,
permutation.cpp and padding.cpp of Transformer Engine 2.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory
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
    """Tokens in the order of their experts, where each went, and a workspace to give back."""
    buffers = list(workspace) or [
        empty_as([most_tokens], torch.int32),
        torch.arange(most_tokens, dtype=torch.int32, device="cuda"),
        empty_as([most_tokens], torch.int32),
        empty_as([8 * most_tokens], torch.int8),
    ]
    launch(f"{_TE}radix_sort_pairs", memory("sort"), reads=[indices], writes=buffers[:3:2])
    rows = indices.numel()
    permuted = empty_as((out_tokens if out_tokens > 0 else rows, tokens.shape[1]), tokens.dtype)
    places = empty_as([rows], torch.int32)
    _move("permute", permuted, reads=[tokens], writes=[permuted, places])
    return permuted, places, buffers


def moe_unpermute_fwd(
    tokens: Tensor, dtype: Any, places: Tensor, probs: Tensor, count: int, topk: int
) -> Tensor:
    """The sum of each token's copies, weighted."""
    out = empty_as((count, tokens.shape[1]), tokens.dtype)
    _move("unpermute", out, reads=[tokens, places, probs], writes=[out])
    return out


def moe_unpermute_bwd(
    grad: Tensor, tokens: Tensor, dtype: Any, places: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the copies and of their weights."""
    topk = probs.shape[1] if probs.numel() else 1
    rows = probs.shape[0] if probs.numel() else places.shape[0]
    out = empty_as(tokens.shape, grad.dtype)
    weights = empty_as((rows, topk), torch.float32)
    _move("unpermute_bwd", out, reads=[grad, tokens, places, probs], writes=[out, weights])
    return out, weights


def _move(name: str, moved: Tensor, *, reads: list[Tensor], writes: list[Tensor]) -> None:
    """Rows that are read as often as they are written."""
    larger = max(moved.nbytes, *(tensor.nbytes for tensor in reads))
    cost = memory("index", n_bytes=2 * larger)
    launch(f"{_TE}{name}", cost, reads=reads, writes=writes)


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
