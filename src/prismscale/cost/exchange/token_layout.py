"""Number of tokens for each rank and node, by the routing that the run assumes.

A token goes once to a rank, however many of its experts live there, and once to another node. Each
token draws ``k`` of ``E`` experts one after another by their loads. It misses experts of total load
``L`` with probability ``prod(1 - L / (1 - j / E))`` over ``j < k``, which is exact if all loads are
equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

NVLINK_PEERS = 8
"""Ranks of a node that NVLink connects."""
_KEPT = "_prismscale_layout"
"""Attribute with the layout, on a tensor of the handle that a dispatch and its combine share."""


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Layout of one rank's tokens; all ranks of the group have as many tokens and route alike."""

    tokens: int
    topk: int
    counts: tuple[int, ...]
    """Number of token copies for each expert of the group."""
    ranks: int
    rank: int
    peers: int = NVLINK_PEERS
    """Number of ranks of a node, or of an NVLink domain."""

    def keep_with(self, tensor: Any) -> None:
        """Attach this layout to ``tensor``, where :meth:`kept_with` finds it."""
        setattr(tensor, _KEPT, self)

    @classmethod
    def kept_with(cls, tensor: Any) -> Self:
        """Return the layout that was attached to a tensor of a handle."""
        found: Self = getattr(tensor, _KEPT)
        return found

    @property
    def local_experts(self) -> int:
        """Number of experts of a rank."""
        return len(self.counts) // self.ranks

    @cached_property
    def to_rank(self) -> tuple[int, ...]:
        """Number of tokens for each rank."""
        return tuple(self._tokens_of(self._experts_of(r, r + 1)) for r in range(self.ranks))

    @cached_property
    def to_node(self) -> tuple[int, ...]:
        """Number of tokens for each node."""
        starts = range(0, self.ranks, self.peers)
        return tuple(self._tokens_of(self._experts_of(r, r + self.peers)) for r in starts)

    @property
    def received(self) -> int:
        """Number of tokens that this rank receives from all ranks."""
        return self.ranks * self.to_rank[self.rank]

    @property
    def received_by_node(self) -> int:
        """Number of tokens for its node that this rank receives over the network from its peers."""
        return len(self.to_node) * self.to_node[self.rank // self.peers]

    def received_by_expert(self, alignment: int) -> list[int]:
        """Return the copies for each expert of this rank, padded to a multiple of ``alignment``."""
        start = self.rank * self.local_experts
        own = self.counts[start : start + self.local_experts]
        return [-(-self.ranks * count // alignment) * alignment for count in own]

    @property
    def exchanged(self) -> int:
        """Number of tokens of an all_to_all that takes as long as the exchange.

        On one node it is what this rank sends. With several nodes it is the number with which the
        all_to_all puts the same traffic on the network.
        """
        if len(self.to_node) == 1:
            return sum(self.to_rank)
        own = self.rank // self.peers
        over_network = sum(self.to_node) - self.to_node[own]
        return over_network * self.ranks // (self.ranks - self.peers)

    def _experts_of(self, first: int, after: int) -> Sequence[int]:
        return self.counts[first * self.local_experts : after * self.local_experts]

    def _tokens_of(self, counts: Sequence[int]) -> int:
        load = sum(counts) / max(sum(self.counts), 1)
        misses = 1.0
        for draw in range(self.topk):
            misses *= max(0.0, 1 - load / (1 - draw / len(self.counts)))
        return round(self.tokens * (1 - misses))
