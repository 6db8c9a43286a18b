"""Context parallelism of packed sequences: each is split over the ranks, two parts to a rank.

Tensors are packed: (tokens, heads, size), or (2, tokens, heads, size) for keys and values.
Source: ``thd_*`` in pytorch/csrc/extensions/attention.cpp and common/fused_attn/context_parallel.cu
of Transformer Engine 2.2 to 2.18.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import launch, memory
from prismscale.devices.null.libraries.transformer_engine.quantized_tensors import empty_as

_TE = "transformer_engine::"
_COPY, _NOTHING = "copy", "none"


def thd_get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int
) -> Tensor:
    """Return the indices of the tokens on ``rank``: int32[total_tokens / world_size]."""
    out = empty_as((total_tokens // world_size,), torch.int32)
    launch(
        f"{_TE}thd_get_partitioned_indices", memory("pointwise"), reads=[cu_seqlens], writes=[out]
    )
    return out


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """Return the first or the second half of each sequence."""
    shape = list(tensor.shape)
    shape[0 if tensor.dim() == 3 else 1] //= 2
    out = empty_as(tuple(shape), tensor.dtype)
    # Only half of the tensor is read.
    cost = memory("strided_copy", n_bytes=2 * out.nbytes)
    launch(f"{_TE}thd_read_half_tensor", cost, reads=[tensor, cu_seqlens], writes=[out])
    return out


def thd_read_second_half_lse(
    lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int
) -> Tensor:
    """Return the row sums (log-sum-exp) of the second half of each sequence."""
    out = lse.new_zeros((*lse.shape[:-1], second_half_lse_seqlen))
    cost = memory("strided_copy", n_bytes=2 * out.nbytes)
    launch(f"{_TE}thd_read_second_half_lse", cost, reads=[lse, cu_seqlens], writes=[out])
    return out


def thd_second_half_lse_correction(
    lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool
) -> None:
    """Add row sums of one exchange to those of the second halves."""
    # The row sums of the second halves are read and written, those of the exchange only read.
    cost = memory("pointwise", n_bytes=3 * lse_per_step.nbytes)
    reads = [lse_per_step, cu_seqlens]
    launch(f"{_TE}thd_second_half_lse_correction", cost, reads=reads, writes=[lse])


def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Add the output of one exchange, rescaled, to the output of all exchanges."""
    cost = memory("pointwise", n_bytes=3 * out_per_step.nbytes)
    reads = [out_per_step, lse, lse_per_step, cu_seqlens]
    launch(f"{_TE}thd_out_correction", cost, reads=reads, writes=[out])


def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Add or copy halves of one exchange's gradient to that of all, or leave a half as it is."""
    halves = [half for half in (first_half, second_half) if half != _NOTHING]
    passes = sum(2 if half == _COPY else 3 for half in halves)
    n_bytes = passes * grad_per_step.nbytes // max(len(halves), 1)
    reads = [grad_per_step, cu_seqlens]
    cost = memory("pointwise", n_bytes=n_bytes)
    launch(f"{_TE}thd_grad_correction", cost, reads=reads, writes=[grad])


FUNCTIONS = {
    "thd_get_partitioned_indices": thd_get_partitioned_indices,
    "thd_read_half_tensor": thd_read_half_tensor,
    "thd_read_second_half_lse": thd_read_second_half_lse,
    "thd_second_half_lse_correction": thd_second_half_lse_correction,
    "thd_out_correction": thd_out_correction,
    "thd_grad_correction": thd_grad_correction,
}
