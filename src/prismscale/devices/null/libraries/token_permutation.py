"""Permutation of tokens into the order of their experts and back.

The kernels are those of grouped_gemm, which Transformer Engine took over. A sort of the indices
gives the place of each token. The sort's own storage is estimated as a second copy of both arrays,
which is what a radix sort of pairs takes. Source: csrc/permute.cu of grouped_gemm;
pytorch/csrc/extensions/permutation.cpp of Transformer Engine 2.11.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory


def permute(
    library: str,
    tokens: Tensor,
    indices: Tensor,
    out_tokens: int,
    workspace: Sequence[Tensor],
    most_tokens: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return tokens (rows) in the order of experts, the place of each, and a workspace.

    The caller passes the workspace to the next call. ``out_tokens`` is the number of tokens that
    are kept; 0 keeps all.
    """
    buffers = list(workspace) or _workspace(tokens, most_tokens)
    launch(f"{library}::radix_sort_pairs", memory("sort"), reads=[indices], writes=buffers[:3:2])
    rows = indices.numel()
    permuted = tokens.new_empty(out_tokens if out_tokens > 0 else rows, tokens.shape[1])
    places = tokens.new_empty(rows, dtype=torch.int32)
    _move(f"{library}::permute", reads=[tokens], writes=[permuted, places])
    return permuted, places, buffers


def _workspace(tokens: Tensor, most_tokens: int) -> list[Tensor]:
    return [
        tokens.new_empty(most_tokens, dtype=torch.int32),
        torch.arange(most_tokens, dtype=torch.int32, device=tokens.device),
        tokens.new_empty(most_tokens, dtype=torch.int32),
        tokens.new_empty(8 * most_tokens, dtype=torch.int8),
    ]


def unpermute(
    library: str, tokens: Tensor, places: Tensor, probs: Tensor | None, count: int
) -> Tensor:
    """Return the weighted sum of each token's copies."""
    out = tokens.new_empty(count, tokens.shape[1])
    _move(f"{library}::unpermute", reads=[tokens, places, probs], writes=[out])
    return out


def unpermute_backward(
    library: str, grad: Tensor, tokens: Tensor, places: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the copies and of their weights."""
    has_probs = probs.numel() > 0
    shape = tuple(probs.shape) if has_probs else (places.shape[0], 1)
    out = grad.new_empty(tokens.shape)
    weights = grad.new_empty(shape, dtype=torch.float32)
    reads = [grad, tokens, places, probs]
    _move(f"{library}::unpermute_backward", reads=reads, writes=[out, weights])
    return out, weights


def _move(name: str, *, reads: Sequence[Tensor | None], writes: Sequence[Tensor]) -> None:
    """Launch a kernel that reads and writes each row once, and one row for several."""
    moved = sum(tensor.nbytes for tensor in (*reads, *writes) if tensor is not None)
    launch(name, memory("index", n_bytes=moved), reads=reads, writes=writes)
