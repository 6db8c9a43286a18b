"""How many tokens go where, by the routing that the run assumes.

A token goes once to a rank, however many of its experts live there, and once to another node. With
``k`` of ``E`` experts a token, drawn one after another by their loads, it misses experts of load
``L`` with probability ``prod(1 - L / (1 - j / E))`` over ``j < k``: exact where loads are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from prismscale.devices.null.libraries.deep_ep.buffer_sizes import NVLINK_PEERS

_KEPT = "_prismscale_layout"
"""On the tensor of a handle that a dispatch and its combine have in common."""


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Of the tokens of one rank; all ranks of the group have as many, and route alike."""

    tokens: int
    topk: int
    counts: tuple[int, ...]
    """Copies for each expert, all experts of the group."""
    ranks: int
    rank: int
    peers: int = NVLINK_PEERS
    """Ranks of a node, or of an NVLink domain."""

    def keep_with(self, tensor: Any) -> None:
        """Let :meth:`kept_with` find this."""
        setattr(tensor, _KEPT, self)

    @classmethod
    def kept_with(cls, tensor: Any) -> Self:
        """The layout that was kept with a tensor of a handle."""
        found: Self = getattr(tensor, _KEPT)
        return found

    @property
    def local_experts(self) -> int:
        """Experts of a rank."""
        return len(self.counts) // self.ranks

    @cached_property
    def to_rank(self) -> tuple[int, ...]:
        """Tokens for each rank."""
        return tuple(self._tokens_of(self._experts_of(r, r + 1)) for r in range(self.ranks))

    @cached_property
    def to_node(self) -> tuple[int, ...]:
        """Tokens for each node."""
        starts = range(0, self.ranks, self.peers)
        return tuple(self._tokens_of(self._experts_of(r, r + self.peers)) for r in starts)

    @property
    def received(self) -> int:
        """Tokens that this rank gets, from all."""
        return self.ranks * self.to_rank[self.rank]

    @property
    def received_by_node(self) -> int:
        """Tokens that arrive at this rank over the network, for its node: of its peers there."""
        return len(self.to_node) * self.to_node[self.rank // self.peers]

    def received_by_expert(self, alignment: int) -> list[int]:
        """Copies for each expert of this rank, padded to a multiple of ``alignment``."""
        start = self.rank * self.local_experts
        own = self.counts[start : start + self.local_experts]
        return [-(-self.ranks * count // alignment) * alignment for count in own]

    @property
    def exchanged(self) -> int:
        """Tokens of an all_to_all that takes as long: what this rank sends, or, with several nodes,
        as many as give the network what it has to carry."""
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
