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
from prismscale.graph.pipeline import messages_of, smallest_group
from prismscale.graph.trace import GroupRecord, RankTrace

Traces = Mapping[int, RankTrace]
"""By captured rank."""
Message = tuple[int, int]
"""Group index and peer, as a trace has them."""
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
    used = sorted(set(representative_R.tolist()))
    by_trace = {rank: _narrowings(traces[rank]) for rank in used}
    if not any(by_trace.values()):
        return traces, groups
    found: set[Narrowing] = set()
    for rank, representative in enumerate(representative_R.tolist()):
        own = groups.of_rank(rank)
        pairs = by_trace[representative].values()
        found |= {(own[wide], own[small]) for wide, small in pairs}
    added = _Added(groups, sorted(found))
    moved = {**traces, **{rank: added.moved(traces[rank], by_trace[rank]) for rank in used}}
    wider = added.table()
    fits = all(
        wider.matches(rank, moved[representative])
        for rank, representative in enumerate(representative_R.tolist())
    )
    return (moved, wider) if fits else (traces, groups)


def as_sent(trace: RankTrace) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
    """``group_index_N`` and ``peer_N`` as the program called: messages in the groups that it sent
    them in."""
    moves = {}
    for index, peer in messages_of(trace):
        record = trace.groups[index]
        if record.within is not None:
            wide = trace.groups[record.within].ranks
            moves[index, peer] = record.within, _peer(trace.rank, record.ranks, wide, peer)
    return _moved(trace, moves)


def _moved(
    trace: RankTrace, moves: Mapping[Message, Message]
) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
    """``group_index_N`` and ``peer_N`` with some messages as others."""
    group_index_N, peer_N = trace.group_index_N.copy(), trace.peer_N.copy()
    for (group_index, peer), new in moves.items():
        is_it = trace.is_message_N & (trace.group_index_N == group_index) & (trace.peer_N == peer)
        group_index_N[is_it], peer_N[is_it] = new
    return group_index_N, peer_N


def _narrowings(trace: RankTrace) -> dict[Message, Narrowing]:
    """Of a rank's messages that can move, from which of its groups to which smaller one."""
    pairs = {
        message: (message[0], smallest_group(trace, *message)) for message in messages_of(trace)
    }
    return {message: pair for message, pair in pairs.items() if _is_part(trace, *pair)}


def _is_part(trace: RankTrace, wide: int, small: int) -> bool:
    """Whether the group ``small`` is another one, of whose members all are in ``wide``."""
    ranks = (set(trace.groups[k].ranks) for k in (small, wide))
    return small != wide and set.issubset(*ranks)


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
        own, places = [list(g) for g in old.groups_R], [list(p) for p in old.positions_R]
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

    def moved(self, trace: RankTrace, narrowings: Mapping[Message, Narrowing]) -> RankTrace:
        """``trace`` with its messages in the added groups."""
        own = self.groups.of_rank(trace.rank)
        index_of = {g: index for index, g in enumerate(own)}
        pairs = [pair for pair in self.narrowings if pair[1] in index_of]
        new_of = {
            (index_of[wide], index_of[small]): len(own) + n for n, (wide, small) in enumerate(pairs)
        }
        moves = {}
        for message, pair in narrowings.items():
            ranks, new = (trace.groups[k].ranks for k in pair)
            moves[message] = new_of[pair], _peer(trace.rank, ranks, new, message[1])
        group_index_N, peer_N = _moved(trace, moves)
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
