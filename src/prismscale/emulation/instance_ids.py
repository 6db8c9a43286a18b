"""Gives each communication a name that is the same on every member of its group."""

from __future__ import annotations

import zlib

from prismscale.emulation.hook import Collective
from prismscale.graph.node import MOST_TAGS, CollectiveOp

_LOOK_AT_TAGS = frozenset({"gloo", "mpi", "ucc"})
"""Backends that match by tag: messages of one pair with different tags may overtake each other."""


def tag_of(collective: Collective) -> int:
    """Return the tag that tells messages of one pair apart; 0 if the backend ignores tags."""
    return collective.tag % MOST_TAGS if collective.group.backend in _LOOK_AT_TAGS else 0


def peer_of(collective: Collective) -> int:
    """Return the peer as a trace stores it: see :attr:`prismscale.graph.trace.RankTrace.peer_N`."""
    group = collective.group
    if not collective.op.is_p2p:
        return collective.root
    offset = (collective.root - group.group_rank) % group.size
    return offset + group.size * tag_of(collective)


class InstanceIds:
    """Names communications by group, channel and running number. It is a group observer."""

    def __init__(self) -> None:
        self._groups: dict[int, str] = {}
        self._occurrences: dict[tuple[int, ...], int] = {}
        self._uses: dict[str, int] = {}

    def group_created(
        self, ranks: tuple[int, ...], name: str, backend: str, group_index: int | None
    ) -> None:
        """Name the group by its ranks and a count, since several groups may hold the same ranks."""
        if group_index is None:
            return
        n = self._occurrences.get(ranks, 0)
        self._occurrences[ranks] = n + 1
        self._groups[group_index] = f"{zlib.crc32(repr(ranks).encode()):08x}-{n}"

    def group(self, group_index: int) -> str:
        """Return the name of a group."""
        return self._groups[group_index]

    def channel(self, collective: Collective) -> str:
        """Return the name of the communication's channel, within which members match in order.

        A channel is a group's collectives, or the messages of a pair in one direction; of one tag,
        if the backend looks at tags (NCCL does not).
        """
        group, channel = collective.group, "c"
        if collective.op.is_p2p:
            ends = (group.group_rank, collective.root)
            sender, receiver = ends if collective.op == CollectiveOp.SEND else ends[::-1]
            channel = f"{sender}-{receiver}"
            if tag := tag_of(collective):
                channel += f"-{tag}"
        return f"{self._groups[group.group_index]}.{channel}"

    def name(self, collective: Collective) -> str:
        """Return the communication's name: its channel and the number of this use, counted here."""
        stem = self.channel(collective)
        n = self._uses.get(stem, 0)
        self._uses[stem] = n + 1
        return f"{stem}.{n}"
