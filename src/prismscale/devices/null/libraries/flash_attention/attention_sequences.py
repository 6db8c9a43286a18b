"""Sequences and masks that a call gives to the extensions of FlashAttention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prismscale.devices.null.libraries.launches import Cost, attention
from prismscale.devices.null.value_policy import known

_BLOCK = 128
"""Number of queries of one thread block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Queries, keys and values of a call, with their lengths and mask.

    The tensors are of (batch, length, heads, size), or packed: (tokens, heads, size).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    batch: int
    length: int
    keys: int
    causal: bool
    window: int
    """Number of keys to the left that a query sees; all if negative."""

    @property
    def is_packed(self) -> bool:
        """Whether sequences of several lengths lie one after another."""
        return self.q.dim() == 3

    @property
    def heads(self) -> int:
        """Number of heads of the queries."""
        return self.q.shape[-2]

    def rows(self, *, rounded: int = 1) -> tuple[int, ...]:
        """Return the shape of a tensor that has one number for each row of scores.

        Lengths are padded to a multiple of ``rounded``.
        """
        if self.is_packed:
            extra = rounded * self.batch if rounded > 1 else 0
            return (self.heads, self.q.shape[0] + extra)
        return (self.batch, self.heads, -(-self.length // rounded) * rounded)

    def cost(self, *, backward: bool, deterministic: bool = False) -> Cost:
        """Return the cost of the fused kernel; a ``deterministic`` one sums in a fixed order."""
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
            deterministic=deterministic,
            bits=8 if self.q.dtype == torch.float8_e4m3fn else 16,
        )


def regular(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, left: int) -> Sequences:
    """Return sequences that all have the same length."""
    batch, length = q.shape[:2]
    return Sequences(
        q=q, k=k, v=v, batch=batch, length=length, keys=k.shape[1], causal=causal, window=left
    )


def packed(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, length: int, keys: int, *, causal: bool, left: int
) -> Sequences:
    """Return packed sequences that begin at ``cu`` and have at most ``length`` and ``keys`` tokens.

    If the beginnings are known (documents that the host packed) and both maxima are equal, the
    sequences are replaced by sequences of one length, in whole blocks of queries, that have the
    same number of scores.
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
