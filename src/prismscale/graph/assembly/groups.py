"""Finds all process groups of the job, seen or inferred, from a few captured ranks.

torch makes every rank call ``new_group`` for every group, so one captured rank usually knows them
all. If it does not (``use_local_synchronization``, ``split_group``), a group with a constant stride
is translated to the other ranks. Witness ranks confirm or refute the translation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import GraphError
from prismscale.graph.trace import GroupRecord, RankTrace

GroupKey = tuple[tuple[int, ...], int]
"""The ranks of a group, and how many earlier groups have exactly the same ranks."""


@dataclass(frozen=True, kw_only=True)
class GroupTable:
    """All groups of a job.

    As in a trace, group index ``k`` of a rank means its k-th group in creation order.
    """

    ranks: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    groups_R: tuple[tuple[int, ...], ...]
    """Each rank's groups, as indices into :attr:`ranks`, by group index."""
    positions_R: tuple[tuple[int, ...], ...]
    """Each rank's group rank in each of its groups, by group index."""

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the groups of ``rank`` by group index."""
        return self.groups_R[rank]

    def group_rank(self, rank: int, group_index: int) -> int:
        """Return the group rank of ``rank`` in its group of that index."""
        return self.positions_R[rank][group_index]

    def matches(self, rank: int, trace: RankTrace) -> bool:
        """Return whether ``rank``'s groups have the same sizes, by group index, as ``trace``'s."""
        sizes = [len(self.ranks[g]) for g in self.of_rank(rank)]
        return sizes == [len(g.ranks) for g in trace.groups]


def collect_groups(
    traces: Mapping[int, RankTrace], world_size: int, representative_R: NDArray[np.int64]
) -> GroupTable:
    """Build the group table of a job from the groups that its captured ranks saw.

    Raises:
        GraphError: the groups of some rank cannot be inferred from the captured ranks, or captured
            ranks created their groups in contradictory orders.
    """
    known = _Known()
    orders = [
        [known.add(key, record.name) for key, record in _keyed(records)]
        for trace in traces.values()
        for records in (trace.known_groups, trace.groups)
    ]
    everything_seen = any(len(order) == len(known.names) for order in orders)
    table = known.table(orders, world_size)
    lacking = _lacking(table, traces, representative_R)
    if lacking or not everything_seen:
        moves = {rank: _Moves(trace, known) for rank, trace in traces.items()}
        for rank in range(world_size):
            if rank not in traces:
                # For a rank that lacks no group, the translation only adds the order of its groups.
                move = moves[int(representative_R[rank])]
                orders.append(move.groups_of(rank, may_add=rank in lacking))
        table = known.table(orders, world_size)
        _refuse_unknown(table, traces, representative_R)
    return table


def _keyed(records: Iterable[GroupRecord]) -> Iterable[tuple[GroupKey, GroupRecord]]:
    seen: dict[tuple[int, ...], int] = {}
    for record in records:
        occurrence = seen.get(record.ranks, 0)
        seen[record.ranks] = occurrence + 1
        yield (record.ranks, occurrence), record


@dataclass(kw_only=True, slots=True)
class _Known:
    """Known groups, numbered in the order in which they were first seen.

    The cost of hashing a group of the whole world grows with the world size, so all later work uses
    the numbers.
    """

    ids: dict[GroupKey, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def add(self, key: GroupKey, name: str) -> int:
        """Return the number of a group, adding the group if it is new."""
        number = self.ids.setdefault(key, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number

    def table(self, orders: Sequence[Sequence[int]], world_size: int) -> GroupTable:
        """Build the table of all groups, in an order that agrees with each of ``orders``.

        The order matters because it defines the group indices.
        """
        keys = list(self.ids)
        # Numbers follow the order of the first rank, and the other ranks mostly agree with it.
        order: Sequence[int] = range(len(keys))
        if any(b < a for seen in orders for a, b in itertools.pairwise(seen)):
            order = self._sorted(orders)
        group_indices: list[list[int]] = [[] for _ in range(world_size)]
        positions: list[list[int]] = [[] for _ in range(world_size)]
        for index, number in enumerate(order):
            for position, rank in enumerate(keys[number][0]):
                group_indices[rank].append(index)
                positions[rank].append(position)
        return GroupTable(
            ranks=tuple(keys[number][0] for number in order),
            names=tuple(self.names[number] for number in order),
            groups_R=tuple(tuple(r) for r in group_indices),
            positions_R=tuple(tuple(p) for p in positions),
        )

    def _sorted(self, orders: Sequence[Sequence[int]]) -> Sequence[int]:
        sorter: TopologicalSorter[int] = TopologicalSorter()
        for number in self.ids.values():
            sorter.add(number)
        for earlier, later in {pair for seen in orders for pair in itertools.pairwise(seen)}:
            sorter.add(later, earlier)
        try:
            return list(sorter.static_order())
        except CycleError as error:
            keys = list(self.ids)
            one, other = (_shown(keys[number][0]) for number in error.args[1][:2])
            raise GraphError(
                f"ranks disagree about which group was created first, {one} or {other}; a program "
                "must create its groups in the same order on every rank"
            ) from error


class _Moves:
    """Translates the groups of one captured rank to the ranks that it stands for."""

    def __init__(self, trace: RankTrace, known: _Known) -> None:
        self._known = known
        self._axes = [(key, _stride(key[0]), g.name) for key, g in _keyed(trace.groups)]
        self._numbers: dict[tuple[int, int], int | None] = {}

    def groups_of(self, rank: int, *, may_add: bool) -> list[int]:
        """Return the numbers of the groups of ``rank``, in order of group index.

        A group without a regular stride is left out. So is an unknown group, unless ``may_add``.
        """
        found = [self._number(group_index, rank, may_add) for group_index in range(len(self._axes))]
        return [number for number in found if number is not None]

    def _number(self, group_index: int, rank: int, may_add: bool) -> int | None:
        (ranks, occurrence), stride, name = self._axes[group_index]
        if stride is None:
            return None
        origin = _origin(rank, stride * len(ranks), stride)
        # The number may be None because an earlier rank was not allowed to add the group.
        if (group_index, origin) not in self._numbers or may_add:
            moved = self._numbers.get((group_index, origin))
            if moved is None:
                key = (tuple(range(origin, origin + stride * len(ranks), stride)), occurrence)
                moved = self._known.add(key, name) if may_add else self._known.ids.get(key)
                self._numbers[group_index, origin] = moved
        return self._numbers[group_index, origin]


def _stride(ranks: tuple[int, ...]) -> int | None:
    """Return the stride of a group that is one row of a mesh axis, or None for any other group.

    A mesh axis of size ``n`` and stride ``s`` cuts the world into blocks of ``n * s`` ranks; within
    a block, ranks that are equal modulo ``s`` form a group.
    """
    if len(ranks) == 1:
        return 1
    stride = ranks[1] - ranks[0]
    if stride <= 0 or ranks != tuple(range(ranks[0], ranks[-1] + 1, stride)):
        return None
    return stride if ranks[0] == _origin(ranks[0], stride * len(ranks), stride) else None


def _origin(rank: int, block: int, stride: int) -> int:
    return rank // block * block + rank % stride


def _lacking(
    table: GroupTable, traces: Mapping[int, RankTrace], representative_R: NDArray[np.int64]
) -> set[int]:
    """Return the ranks whose groups do not fit the trace that they are assumed to run."""
    wanted = enumerate(representative_R.tolist())
    return {r for r, captured in wanted if not table.matches(r, traces[captured])}


def _refuse_unknown(
    table: GroupTable, traces: Mapping[int, RankTrace], representative_R: NDArray[np.int64]
) -> None:
    for rank in sorted(_lacking(table, traces, representative_R)):
        trace = traces[int(representative_R[rank])]
        sizes = [len(table.ranks[g]) for g in table.of_rank(rank)]
        raise GraphError(
            f"rank {rank} is taken to run what rank {trace.rank} runs, which uses groups of "
            f"sizes {[len(g.ranks) for g in trace.groups]}, but only groups of sizes {sizes} "
            "are known for it: its program differs from that rank's, or its groups are created by "
            "their members alone and follow no regular stride"
        )


def _shown(ranks: Sequence[int]) -> str:
    """Format a group for a message: all its ranks, or the first three and the last of many."""
    shown = [*map(str, ranks)] if len(ranks) <= 8 else [*map(str, ranks[:3]), "…", str(ranks[-1])]
    return f"[{', '.join(shown)}]"
