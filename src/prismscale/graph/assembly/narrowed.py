"""Messages that are sent in a larger group than they need, moved to one of those who exchange them.

DeepSpeed and picotron pass activations from stage to stage in the group of all ranks. There each
rank has a position of its own, and ranks at different positions cannot advance in lockstep: every
rank would be a class. But its messages stay within a smaller group, the pipeline, in which ranks of
all replicas have the same position. So these messages get a group of their own, which has the ranks
of the smaller group and nothing else in it: what they wait for is what it was, because the n-th
message of a pair is the n-th message of the pair there, too.

Such a group comes after those that the program created. :func:`as_sent` leads back to these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.assembly.groups import GroupTable
from prismscale.graph.trace import GroupRecord, RankTrace

Traces = Mapping[int, RankTrace]
"""By captured rank."""
Narrowing = tuple[int, int]
"""A group in which messages are sent, and a smaller one that holds both ends: indices, of a rank's
groups or of a job's."""


def narrowed(
    traces: Traces, representative_R: NDArray[np.int64], groups: GroupTable
) -> tuple[Traces, GroupTable]:
    """``traces`` and ``groups`` with messages in groups no larger than they need.

    Both are returned as they are where no message can move, and where ranks that run one trace
    would get different groups.

    Args:
        traces: by captured rank.
        representative_R: for every rank the captured rank whose trace it runs.
        groups: the groups of every rank.
    """
    used = sorted(set(representative_R.tolist()) & set(traces))
    by_trace = {rank: _narrowings(traces[rank]) for rank in used}
    if not any(by_trace.values()):
        return traces, groups
    found: set[Narrowing] = set()
    for rank, representative in enumerate(representative_R.tolist()):
        own = groups.of_rank(rank)
        found |= {(own[wide], own[small]) for wide, small in by_trace.get(representative, ())}
    added = _Added(groups, sorted(found))
    moved = {**traces, **{rank: added.moved(traces[rank]) for rank in used}}
    wider = added.table()
    fits = all(
        wider.matches(rank, moved[representative])
        for rank, representative in enumerate(representative_R.tolist())
    )
    return (moved, wider) if fits else (traces, groups)


def as_sent(trace: RankTrace) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
    """``group_index_N`` and ``peer_N`` as the program called: messages in the groups that it sent
    them in."""
    group_index_N, peer_N = trace.group_index_N.copy(), trace.peer_N.copy()
    for index, record in enumerate(trace.groups):
        if record.within is not None:
            wide = trace.groups[record.within].ranks
            for node in np.flatnonzero(trace.group_index_N == index).tolist():
                group_index_N[node] = record.within
                peer_N[node] = _peer(trace.rank, record.ranks, wide, int(trace.peer_N[node]))
    return group_index_N, peer_N


def _narrowings(trace: RankTrace) -> set[Narrowing]:
    """Which of a rank's groups it sends messages in that stay within which smaller one."""
    return {
        (wide, small)
        for wide, peer in _messages(trace)
        if (small := _smallest(trace, wide, peer)) != wide
    }


def _messages(trace: RankTrace) -> dict[tuple[int, int], None]:
    """Group index and peer of a rank's messages, each once."""
    columns = (trace.group_index_N, trace.peer_N)
    rows = (column[trace.is_message_N].tolist() for column in columns)
    return dict.fromkeys(zip(*rows, strict=True))


def _smallest(trace: RankTrace, wide: int, peer: int) -> int:
    """Index of the smallest of a rank's groups that holds both ends of a message; the oldest of
    several, because the other end has to find the same."""
    ranks = trace.groups[wide].ranks
    other = ranks[(ranks.index(trace.rank) + peer) % len(ranks)]
    # A message to itself is a mistake that is told as the program made it.
    fits = (k for k, g in enumerate(trace.groups) if other in g.ranks and other != trace.rank)
    return min(fits, key=lambda k: (len(trace.groups[k].ranks), k != wide, k), default=wide)


def _peer(rank: int, ranks: tuple[int, ...], new: tuple[int, ...], peer: int) -> int:
    """``peer`` of a message in a group of ``ranks``, for a group of ``new`` ones."""
    tag, offset = divmod(peer, len(ranks))
    other = ranks[(ranks.index(rank) + offset) % len(ranks)]
    return (new.index(other) - new.index(rank)) % len(new) + len(new) * tag


@dataclass(frozen=True)
class _Added:
    """A job's groups, and one more for each of ``narrowings``."""

    groups: GroupTable
    narrowings: list[Narrowing]

    def table(self) -> GroupTable:
        """All groups."""
        old, small = self.groups, [small for _, small in self.narrowings]
        groups_R, positions_R = map(list, old.groups_R), map(list, old.positions_R)
        own, places = list(groups_R), list(positions_R)
        for index, g in enumerate(small, start=len(old.ranks)):
            for position, rank in enumerate(old.ranks[g]):
                own[rank].append(index)
                places[rank].append(position)
        return GroupTable(
            ranks=(*old.ranks, *(old.ranks[g] for g in small)),
            names=(*old.names, *(self._name(*pair) for pair in self.narrowings)),
            groups_R=tuple(map(tuple, own)),
            positions_R=tuple(map(tuple, places)),
        )

    def moved(self, trace: RankTrace) -> RankTrace:
        """``trace`` with its messages in the added groups."""
        own = self.groups.of_rank(trace.rank)
        index_of = {g: index for index, g in enumerate(own)}
        pairs = [pair for pair in self.narrowings if pair[1] in index_of]
        new_of = {
            (index_of[wide], index_of[small]): len(own) + n for n, (wide, small) in enumerate(pairs)
        }
        group_index_N, peer_N = trace.group_index_N.copy(), trace.peer_N.copy()
        for wide, peer in _messages(trace):
            small = _smallest(trace, wide, peer)
            if small == wide:
                continue
            ranks = trace.groups[wide].ranks, trace.groups[small].ranks
            is_it = trace.is_message_N & (trace.group_index_N == wide) & (trace.peer_N == peer)
            group_index_N[is_it] = new_of[wide, small]
            peer_N[is_it] = _peer(trace.rank, *ranks, peer)
        records = tuple(
            GroupRecord(
                ranks=self.groups.ranks[small],
                name=self._name(wide, small),
                backend=trace.groups[index_of[wide]].backend,
                within=index_of[wide],
            )
            for wide, small in pairs
        )
        return replace(
            trace, group_index_N=group_index_N, peer_N=peer_N, groups=(*trace.groups, *records)
        )

    def _name(self, wide: int, small: int) -> str:
        """The axis along which messages go, where it has a name."""
        return self.groups.names[small] or self.groups.names[wide]
