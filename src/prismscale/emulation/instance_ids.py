"""Names for communications that are the same on every member."""

from __future__ import annotations

import zlib

from prismscale.emulation.hook import Collective
from prismscale.graph.node import MOST_TAGS, CollectiveOp

_LOOK_AT_TAGS = frozenset({"gloo", "mpi", "ucc"})
"""Backends whose messages of one pair may overtake each other, if their tags differ."""


def tag_of(collective: Collective) -> int:
    """What tells a message from others of its pair; 0 where the backend looks at no tags."""
    return collective.tag % MOST_TAGS if collective.group.backend in _LOOK_AT_TAGS else 0


def peer_of(collective: Collective) -> int:
    """As a trace has it: see :attr:`prismscale.graph.trace.RankTrace.peer_N`."""
    group = collective.group
    if not collective.op.is_p2p:
        return collective.root
    offset = (collective.root - group.group_rank) % group.size
    return offset + group.size * tag_of(collective)


class InstanceIds:
    """Names for communications: group, kind, running number. It observes groups."""

    def __init__(self) -> None:
        self._groups: dict[int, str] = {}
        self._occurrences: dict[tuple[int, ...], int] = {}
        self._uses: dict[str, int] = {}

    def group_created(
        self, ranks: tuple[int, ...], name: str, backend: str, group_index: int | None
    ) -> None:
        """Two groups may hold the same ranks: the how-many-th is part of the name."""
        if group_index is None:
            return
        n = self._occurrences.get(ranks, 0)
        self._occurrences[ranks] = n + 1
        self._groups[group_index] = f"{zlib.crc32(repr(ranks).encode()):08x}-{n}"

    def group(self, group_index: int) -> str:
        """The name of a group."""
        return self._groups[group_index]

    def channel(self, collective: Collective) -> str:
        """The name of those that meet in order: a group's collectives, or the messages of a pair
        in one direction, with one tag where the backend looks at tags (NCCL does not)."""
        group, channel = collective.group, "c"
        if collective.op.is_p2p:
            ends = (group.group_rank, collective.root)
            sender, receiver = ends if collective.op == CollectiveOp.SEND else ends[::-1]
            channel = f"{sender}-{receiver}"
            if tag := tag_of(collective):
                channel += f"-{tag}"
        return f"{self._groups[group.group_index]}.{channel}"

    def name(self, collective: Collective) -> str:
        """The name of this use of its channel."""
        stem = self.channel(collective)
        n = self._uses.get(stem, 0)
        self._uses[stem] = n + 1
        return f"{stem}.{n}"
