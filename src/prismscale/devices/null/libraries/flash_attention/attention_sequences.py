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
class Mask:
    """The keys that a query sees: all up to its own, or those in a window."""

    causal: bool
    left: int = -1
    """Number of keys to the left; all if negative."""
    right: int = -1
    """Number of keys to the right; all if negative, but none if the mask is causal."""

    @property
    def is_causal(self) -> bool:
        """Whether a query sees no key behind its own."""
        return self.causal or self.right == 0

    def of_keys(self, keys: int) -> tuple[int, bool]:
        """Return the number of keys that count, and whether a mask leaves out half of them."""
        right = 0 if self.is_causal else self.right
        seen = self.left + 1 + right
        if self.left >= 0 and right >= 0 and seen < keys:
            return seen, False
        return keys, self.is_causal


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
    mask: Mask

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
        keys, causal = self.mask.of_keys(self.keys)
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


def regular(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Sequences:
    """Return sequences that all have the same length."""
    batch, length = q.shape[:2]
    return Sequences(q=q, k=k, v=v, batch=batch, length=length, keys=k.shape[1], mask=mask)


def packed(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, length: int, keys: int, mask: Mask
) -> Sequences:
    """Return packed sequences that begin at ``cu`` and have at most ``length`` and ``keys`` tokens,
    as :func:`lengths_alike` counts them."""
    batch = cu.numel() - 1
    length, keys = lengths_alike(cu, length, keys)
    return Sequences(q=q, k=k, v=v, batch=batch, length=length, keys=keys, mask=mask)


def lengths_alike(cu: Tensor, length: int, keys: int) -> tuple[int, int]:
    """Return the lengths of queries and keys of packed sequences, as if all were of one length.

    If the beginnings ``cu`` are known (documents that the host packed) and both maxima are equal,
    it is the length, in whole blocks of queries, with which as many tokens have as many scores.
    Otherwise it is the maximum.
    """
    starts = known(cu)
    if starts is None or length != keys:
        return length, keys
    lengths = starts.diff().double()
    alike = float((lengths * lengths).sum() / max(1.0, float(lengths.sum())))
    length = min(length, max(1, -(-round(alike) // _BLOCK)) * _BLOCK)
    return length, length
