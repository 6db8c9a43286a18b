"""Tokens on their way to experts: permutation, padding, and offsets of each expert's tokens.

Source: pytorch/csrc/extensions/permutation.cpp and padding.cpp of Transformer Engine 2.11, misc.cpp
of 2.17.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prismscale.devices.null import value_policy
from prismscale.devices.null.libraries.launches import launch, memory
from prismscale.devices.null.libraries.token_permutation import (
    permute,
    unpermute,
    unpermute_backward,
)

_TE = "transformer_engine::"


def moe_permute_fwd(
    tokens: Tensor,
    dtype: Any,
    indices: Tensor,
    out_tokens: int,
    workspace: Sequence[Tensor],
    most_tokens: int,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Call :func:`~prismscale.devices.null.libraries.token_permutation.permute`."""
    return permute("transformer_engine", tokens, indices, out_tokens, workspace, most_tokens)


def moe_unpermute_fwd(
    tokens: Tensor, dtype: Any, places: Tensor, probs: Tensor, count: int, topk: int
) -> Tensor:
    """Return the weighted sum of each token's copies."""
    return unpermute("transformer_engine", tokens, places, probs, count)


def moe_unpermute_bwd(
    grad: Tensor, tokens: Tensor, dtype: Any, places: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the copies and of their weights."""
    return unpermute_backward("transformer_engine", grad, tokens, places, probs)


def fused_multi_row_padding(tensor: Tensor, out: Tensor, *_: Any) -> None:
    """Copy each expert's rows to ``out``, with zeros up to a multiple."""
    launch(f"{_TE}multi_padding", memory("copy"), reads=[tensor], writes=[out])


def fused_multi_row_unpadding(tensor: Tensor, out: Tensor, *_: Any) -> None:
    """Copy each expert's rows to ``out`` without these zeros."""
    launch(f"{_TE}multi_unpadding", memory("copy"), reads=[tensor], writes=[out])


def splits_to_offsets(splits: Tensor, row_size: int) -> Tensor:
    """Return where each expert's elements begin, and where the last one's end, as int64."""
    return _offsets(splits, row_size, splits.dtype, leads=True)


def splits_to_offsets_multi(
    splits: Tensor,
    device: torch.device,
    *,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk_allocate: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Return splits as int64 on ``device``, and offsets for each stride.

    The offsets are allocated one by one here.
    """
    splits = splits.to(device=device, dtype=torch.int64)
    wanted = zip(strides, dtypes, include_leading_zero, strict=True)
    return splits, [_offsets(splits, stride, dtype, leads=leads) for stride, dtype, leads in wanted]


def _offsets(splits: Tensor, stride: int, dtype: torch.dtype, *, leads: bool) -> Tensor:
    """Return the ends of the experts' elements, after a zero if ``leads``.

    Their values are known if those of the splits are.
    """
    out = splits.new_empty(splits.numel() + leads, dtype=dtype)
    launch(f"{_TE}splits_to_offsets", memory("scan"), reads=[splits], writes=[out])
    known = value_policy.known(splits)
    if known is not None:
        ends = stride * known.cumsum(0)
        found = torch.cat([ends.new_zeros(1), ends]) if leads else ends
        value_policy.set_known(out, found.to(dtype))
    return out


FUNCTIONS = {
    "moe_permute_fwd": moe_permute_fwd,
    "moe_permute_bwd": moe_unpermute_fwd,
    "moe_unpermute_fwd": moe_unpermute_fwd,
    "moe_unpermute_bwd": moe_unpermute_bwd,
    "fused_multi_row_padding": fused_multi_row_padding,
    "fused_multi_row_unpadding": fused_multi_row_unpadding,
    "splits_to_offsets": splits_to_offsets,
    "splits_to_offsets_multi": splits_to_offsets_multi,
}
