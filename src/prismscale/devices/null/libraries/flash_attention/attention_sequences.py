"""Which queries meet which keys, as the extensions of FlashAttention are told."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import Cost, attention
from prismscale.devices.null.value_policy import known

_BLOCK = 128
"""Queries of one thread block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Tensors of (batch, length, heads, size), or packed ones of (tokens, heads, size)."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: int
    length: int
    keys: int
    causal: bool
    window: int
    """Keys to the left that a query sees; negative: all."""

    @property
    def is_packed(self) -> bool:
        """Sequences of several lengths one after another."""
        return self.q.dim() == 3

    @property
    def heads(self) -> int:
        """Of the queries."""
        return self.q.shape[-2]

    def rows(self, *, rounded: int = 1) -> tuple[int, ...]:
        """Shape of one number for each row of scores."""
        if self.is_packed:
            extra = rounded * self.batch if rounded > 1 else 0
            return (self.heads, self.q.shape[0] + extra)
        return (self.batch, self.heads, -(-self.length // rounded) * rounded)

    def cost(self, *, backward: bool) -> Cost:
        """Of the fused kernel."""
        batch = max(1, self.q.shape[0] // max(self.length, 1)) if self.is_packed else self.batch
        keys, causal = self.keys, self.causal
        if causal and 0 <= self.window < keys - 1:
            keys, causal = self.window + 1, False
        return attention(
            batch_heads=batch * self.heads,
            length=self.length,
            keys=keys,
            head_size=self.q.shape[-1],
            value_size=self.v.shape[-1],
            causal=causal,
            backward=backward,
            bits=8 if self.q.dtype == torch.float8_e4m3fn else 16,
        )


def regular(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, left: int) -> Sequences:
    """Sequences of one length."""
    batch, length = q.shape[:2]
    return Sequences(
        q=q, k=k, v=v, batch=batch, length=length, keys=k.shape[1], causal=causal, window=left
    )


def packed(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, length: int, keys: int, *, causal: bool, left: int
) -> Sequences:
    """Sequences one after another, which begin at ``cu`` and are of these lengths at most.

    Where the beginnings are known (documents that the host packed), sequences that are all as long
    as makes the same number of scores stand for them, in whole blocks of queries.
    """
    batch = cu.numel() - 1
    starts = known(cu)
    if starts is not None and length == keys:
        lengths = starts.diff().double()
        alike = float((lengths * lengths).sum() / max(1.0, float(lengths.sum())))
        length = keys = min(length, max(1, -(-round(alike) // _BLOCK)) * _BLOCK)
    return Sequences(
        q=q, k=k, v=v, batch=batch, length=length, keys=keys, causal=causal, window=left
    )
