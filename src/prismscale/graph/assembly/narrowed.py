"""Moves messages that are sent in a larger group than they need to a smaller group.

DeepSpeed and picotron pass activations from stage to stage in the group of all ranks. In that group
each rank has a position of its own, and ranks at different positions cannot advance in lockstep, so
every rank would be a class. But a rank's messages stay within a smaller group, the pipeline, in
which corresponding ranks of all replicas have the same position. So the assembler adds a group for
these messages alone, with the ranks of the smaller group. The messages wait for the same peers as
before, because the n-th message of a pair in the large group is also the n-th message of the pair
in the added group.

Added groups come after the groups that the program created. :func:`as_sent` gives the group and
peer that the program used.
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
"""Traces by captured rank."""
Message = tuple[int, int]
"""Group index and peer of a message, as a trace stores them."""
Narrowing = tuple[int, int]
"""A group in which messages are sent, and a smaller one that holds both ends. Both are indices,
either into a rank's groups or into the job's."""


def narrowed(
    traces: Traces, representative_R: NDArray[np.int64], groups: GroupTable
) -> tuple[Traces, GroupTable]:
    """Return ``traces`` and ``groups`` with messages in groups no larger than they need.

    Both are returned unchanged if no message can move, or if ranks that run one trace would get
    different groups or other peers.

    Args:
        traces: by captured rank.
        representative_R: for every rank, the captured rank whose trace it runs.
        groups: the groups of every rank.
    """
    used = sorted(set(representative_R.tolist()))
    by_trace = {rank: _narrowings(traces[rank]) for rank in used}
    if not any(by_trace.values()):
        return traces, groups
    ways = {rank: _ways(groups, rank, by_trace[rank]) for rank in used}
    found: set[Narrowing] = set()
    for rank, representative in enumerate(representative_R.tolist()):
        own, messages = groups.of_rank(rank), by_trace[representative]
        # In a ring over all ranks only some members have their neighbour in the smaller group.
        if _ways(groups, rank, messages) != ways[representative]:
            return traces, groups
        found |= {(own[wide], own[small]) for wide, small in messages.values()}
    added = _Added(groups, sorted(found))
    moved = {**traces, **{rank: added.moved(traces[rank], by_trace[rank]) for rank in used}}
    wider = added.table()
    fits = all(
        wider.matches(rank, moved[representative])
        for rank, representative in enumerate(representative_R.tolist())
    )
    return (moved, wider) if fits else (traces, groups)


def _ways(groups: GroupTable, rank: int, messages: Mapping[Message, Narrowing]) -> list[int | None]:
    """Return, for each message of ``rank``, how many places further on in the smaller group its
    peer is; None where it is not there."""
    found: list[int | None] = []
    for (_, peer), (wide, small) in messages.items():
        large, few = (groups.ranks[groups.of_rank(rank)[index]] for index in (wide, small))
        # Not looked for in the larger group, which may have all ranks.
        other = large[(groups.positions_R[rank][wide] + peer) % len(large)]
        found.append((few.index(other) - few.index(rank)) % len(few) if other in few else None)
    return found


def as_sent(trace: RankTrace) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
    """Return ``group_index_N`` and ``peer_N`` with messages in the groups that the program used."""
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
    """Return ``group_index_N`` and ``peer_N`` with some messages replaced as ``moves`` says."""
    group_index_N, peer_N = trace.group_index_N.copy(), trace.peer_N.copy()
    for (group_index, peer), new in moves.items():
        is_it = trace.is_message_N & (trace.group_index_N == group_index) & (trace.peer_N == peer)
        group_index_N[is_it], peer_N[is_it] = new
    return group_index_N, peer_N


def _narrowings(trace: RankTrace) -> dict[Message, Narrowing]:
    """Return, for each of a rank's messages that can move, its group and the smaller group."""
    pairs = {
        message: (message[0], smallest_group(trace, *message)) for message in messages_of(trace)
    }
    return {message: pair for message, pair in pairs.items() if _is_part(trace, *pair)}


def _is_part(trace: RankTrace, wide: int, small: int) -> bool:
    """Return whether ``small`` is a different group, and all its members are in ``wide``."""
    ranks = (set(trace.groups[k].ranks) for k in (small, wide))
    return small != wide and set.issubset(*ranks)


def _peer(rank: int, ranks: tuple[int, ...], new: tuple[int, ...], peer: int) -> int:
    """Translate the ``peer`` of a message from a group of ``ranks`` to a group of ``new`` ranks."""
    tag, offset = divmod(peer, len(ranks))
    other = ranks[(ranks.index(rank) + offset) % len(ranks)]
    return (new.index(other) - new.index(rank)) % len(new) + len(new) * tag


@dataclass(frozen=True)
class _Added:
    """A job's groups, and one added group for each of ``narrowings`` (job-wide indices)."""

    groups: GroupTable
    narrowings: list[Narrowing]

    def table(self) -> GroupTable:
        """Return the table of all groups, with the added ones last."""
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
        """Return ``trace`` with its messages in the added groups."""
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
        """Return the name of the smaller group, or of the larger one if the smaller has none."""
        return self.groups.names[small] or self.groups.names[wide]
