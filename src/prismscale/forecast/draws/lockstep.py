"""Fuses ranks that move in lockstep: a smaller graph with the same step times.

The ranks of a tensor-parallel group meet after every few kernels. A *lockstep set* is such a group
that lies within one class; it becomes one rank of the fused graph. A *chain* is a sequence of nodes
that needs nothing from outside the set until its end: computations of the members and collectives
of the set, one after the other. It becomes one computation, which lasts

    sum over its segments of (max over the members of the segment's computations + its collective).

In the fused graph, a member leaves a chain when the slowest member of its set does. This is exact
where the chain ends with the set's collective. Where it ends with a computation (an optimizer), it
is an approximation: faster members are held back at the chain's end already, not only at the set's
next collective. Step times of the fused graph are then an upper bound.

Groups that run in parallel through a set (one data-parallel group for each member) are represented
by one of them: they start together, and their communication is drawn once, as
``DistributionDraws.once_G`` does on the whole graph.

Array axes: ``M`` members of a class, ``F`` members of its fused class, ``K`` ranks of a lockstep
set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import GraphError, UsageError
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.job_graph import GroupFamily, GroupSlot, JobGraph, RankClass
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import RankTrace

ENDS_WITH_COLLECTIVE = 0.5
"""Share of chains with computation that must end with a collective of the set, in every class. With
less, the set does not count as moving in lockstep. The share is 1 except for the optimizer in
tensor-parallel groups, two thirds with zero-bubble schedules (weight gradients need no collective),
and near 0 in data-parallel groups."""


@dataclass(frozen=True, kw_only=True)
class FusedClass:
    """How the nodes and members of a class were fused."""

    chains: tuple[tuple[int, ...], ...]
    """For each fused body node, the body nodes of the original class."""
    members_KF: NDArray[np.int64]
    """Member of the original class, by position in its set and by fused member."""


@dataclass(frozen=True, kw_only=True)
class FusedGraph:
    """A fused graph and its origin."""

    graph: JobGraph
    origin: JobGraph
    classes: tuple[FusedClass, ...]
    set_group_index: int
    """Group index of the lockstep sets in every class of the origin."""
    fused_group: tuple[NDArray[np.int64], ...]
    """For each family, the fused group that each group of the origin became."""

    @property
    def set_size(self) -> int:
        """Number of ranks in one lockstep set."""
        return int(self.classes[0].members_KF.shape[0])

    def is_compute(self, class_index: int, node: int) -> bool:
        """Return whether body node ``node`` of the origin is computation."""
        trace = self.origin.classes[class_index].trace
        return bool(trace.kind_N[trace.n_prologue + node] == NodeKind.COMPUTE)


def fuse(graph: JobGraph) -> FusedGraph | None:
    """Fuse ``graph`` along its most used lockstep sets, or return None where it has none.

    Raises:
        GraphError: the sets do not fit the job's other groups (a group that holds only some members
            of a set at different positions).
    """
    group_index = _lockstep_group(graph)
    if group_index is None:
        return None
    return fuse_sets(graph, group_index, [_chains(c.trace, group_index) for c in graph.classes])


def fuse_sets(
    graph: JobGraph, group_index: int, chains_C: Sequence[tuple[tuple[int, ...], ...]]
) -> FusedGraph:
    """Fuse the members of each set into one rank, and the nodes of each chain into one node.

    Args:
        group_index: names the groups that are the sets.
        chains_C: by class, body nodes grouped into chains, in the order of the fused body.

    Raises:
        GraphError: the sets do not fit the job's other groups.
    """
    set_R = _set_of_rank(graph, group_index)
    classes, fused = [], []
    found = [_fused_family(f, set_R) for f in graph.families]
    families = tuple(f for f, _ in found)
    for rank_class in graph.classes:
        slot = rank_class.slots[group_index]
        # Sorted by (position, group): one row for each position in the sets.
        members_KF = np.argsort(slot.slot_M, kind="stable").reshape(-1, _n_groups(graph, slot))
        chains = chains_C[rank_class.index]
        sets_F = set_R[rank_class.members_M[members_KF[0]]]
        # Members of a class are in ascending order of rank.
        order = np.argsort(sets_F)
        members_KF, sets_F = members_KF[:, order], sets_F[order]
        slots = tuple(_fused_slot(s, families, sets_F) for s in rank_class.slots)
        trace = _fused_trace(rank_class.trace, chains, len(sets_F))
        classes.append(
            RankClass(index=rank_class.index, trace=trace, members_M=sets_F, slots=slots)
        )
        fused.append(FusedClass(chains=chains, members_KF=members_KF))
    small = JobGraph(
        world_size=int(set_R.max()) + 1,
        classes=tuple(classes),
        families=families,
        meta={**graph.meta, "fused": f"lockstep sets of {fused[0].members_KF.shape[0]}"},
    )
    return FusedGraph(
        graph=small,
        origin=graph,
        classes=tuple(fused),
        set_group_index=group_index,
        fused_group=tuple(g for _, g in found),
    )


def _n_groups(graph: JobGraph, slot: GroupSlot) -> int:
    return graph.families[slot.family].n_groups


def _lockstep_group(graph: JobGraph) -> int | None:
    """Return the most used group index whose groups are lockstep sets in every class, or None."""
    used = {}
    for group_index in groups_within_classes(graph):
        if (
            min(_share_ending_with_collective(c.trace, group_index) for c in graph.classes)
            >= ENDS_WITH_COLLECTIVE
        ):
            used[group_index] = sum(_collectives(c.trace, group_index) for c in graph.classes)
    return max(used, key=lambda r: used[r]) if used else None


def groups_within_classes(graph: JobGraph) -> list[int]:
    """Return the group indices whose groups lie within their class in every class.

    All groups of such an index have the same size.
    """
    found = []
    for group_index in range(min(len(c.slots) for c in graph.classes)):
        families = [graph.families[c.slots[group_index].family] for c in graph.classes]
        within = all(
            family.group_size * family.n_groups == rank_class.size
            for family, rank_class in zip(families, graph.classes, strict=True)
        )
        sizes = {family.group_size for family in families}
        if within and len(sizes) == 1 and sizes != {1}:
            found.append(group_index)
    return found


def _share_ending_with_collective(trace: RankTrace, group_index: int) -> float:
    """Return the fraction of chains with computation that end with a collective of the group."""
    first = trace.n_prologue
    kinds, group_indices = trace.kind_N[first:], trace.group_index_N[first:]
    takes_time = trace.body_ns_SB.max(axis=0) > 0
    ending = computing = 0
    for chain in _chains(trace, group_index):
        if any(kinds[b] == NodeKind.COMPUTE and takes_time[b] for b in chain):
            computing += 1
            last = chain[-1]
            ending += kinds[last] == NodeKind.COLLECTIVE and group_indices[last] == group_index
    return ending / computing if computing else 0.0


def _collectives(trace: RankTrace, group_index: int) -> int:
    body = slice(trace.n_prologue, None)
    in_group = trace.group_index_N[body] == group_index
    return int((in_group & ~trace.is_message_N[body]).sum())


def _set_of_rank(graph: JobGraph, group_index: int) -> NDArray[np.int64]:
    """Return the new rank of every rank. Sets are numbered in the order of their first members."""
    first_R = np.empty(graph.world_size, dtype=np.int64)
    for rank_class in graph.classes:
        table = graph.families[rank_class.slots[group_index].family].ranks_KG
        first_R[table] = table.min(axis=0)
    return np.unique(first_R, return_inverse=True)[1].astype(np.int64)


def _fused_family(
    family: GroupFamily, set_R: NDArray[np.int64]
) -> tuple[GroupFamily, NDArray[np.int64]]:
    """Convert a family to groups of lockstep sets.

    Returns:
        The fused family: a group lists each set once, in the order of the sets' first members, and
        equal groups are merged. And ``[G]``: for each group of the given family, the fused group
        that it became.
    """
    columns: dict[tuple[int, ...], int] = {}
    became = [
        columns.setdefault(tuple(dict.fromkeys(ranks)), len(columns))
        for ranks in set_R[family.ranks_KG].T.tolist()
    ]
    if len({len(c) for c in columns}) != 1:
        raise GraphError(
            f"groups '{family.name}' hold different numbers of lockstep sets; forecast without "
            "fusing (--no-fuse)"
        )
    table = np.array(list(columns), dtype=np.int64).T
    fused = GroupFamily(index=family.index, name=family.name, ranks_KG=table)
    return fused, np.array(became, dtype=np.int64)


def _fused_slot(
    slot: GroupSlot, families: Sequence[GroupFamily], sets_F: NDArray[np.int64]
) -> GroupSlot:
    table = families[slot.family].ranks_KG
    # Every set sits in one group of the family, at one position.
    position_of = {int(r): divmod(i, table.shape[1]) for i, r in enumerate(table.ravel())}
    places = [position_of[int(s)] for s in sets_F]
    if table.size != len(position_of):
        raise GraphError("a lockstep set sits in several groups of one family; use --no-fuse")
    group_M = np.array([g for _, g in places], dtype=np.int64)
    position_M = np.array([k for k, _ in places], dtype=np.int64)
    same = bool((position_M == position_M[0]).all())
    return GroupSlot(
        family=slot.family,
        slot_M=position_M * table.shape[1] + group_M,
        group_M=group_M,
        group_rank=int(position_M[0]) if same else -1,
    )


def _chains(trace: RankTrace, group_index: int) -> tuple[tuple[int, ...], ...]:
    """Group body nodes into chains. A node that cannot be fused is a chain of its own."""
    first, n = trace.n_prologue, trace.n_body
    readers = [0] * n
    preds = [trace.predecessors(first + b).tolist() for b in range(n)]
    for b in range(n):
        for distance in preds[b]:
            readers[(b - distance) % n] += 1
    kinds = trace.kind_N[first:].tolist()
    group_indices = trace.group_index_N[first:].tolist()
    inside = [
        kinds[b] == NodeKind.COMPUTE
        or (kinds[b] == NodeKind.COLLECTIVE and group_indices[b] == group_index)
        for b in range(n)
    ]
    chains: list[list[int]] = []
    chain_of_last: dict[int, list[int]] = {}
    for b in range(n):
        # A node joins the chain of its predecessor if it has only this one, and no other node reads
        # it.
        chain = chain_of_last.get(b - preds[b][0]) if len(preds[b]) == 1 else None
        before = chain[-1] if chain else -1
        if chain is not None and inside[b] and readers[before] == 1 and inside[before]:
            del chain_of_last[before]
            chain.append(b)
        else:
            chain = [b]
            chains.append(chain)
        chain_of_last[b] = chain
    # A chain is sorted by its last node: everything that it needs comes before that node.
    return tuple(tuple(c) for c in sorted(chains, key=lambda c: c[-1]))


def _fused_trace(
    trace: RankTrace, chains: tuple[tuple[int, ...], ...], world_size: int
) -> RankTrace:
    first, n = trace.n_prologue, trace.n_body
    builder = TraceBuilder(rank=0, world_size=world_size, groups=trace.groups)
    position_of_last = {chain[-1]: i for i, chain in enumerate(chains)}
    for i, chain in enumerate(chains):
        node = first + chain[-1]
        label, lane = trace.labels[trace.label_N[node]], trace.lanes[trace.lane_N[node]]
        preds = []
        for distance in trace.predecessors(first + chain[0]).tolist():
            # An edge from an earlier step goes back the same number of fused bodies. A node that is
            # read from outside its chain is the chain's last.
            bodies, source = divmod(chain[0] - distance, n)
            preds.append(position_of_last[source] + bodies * len(chains))
        if len(chain) > 1 or trace.kind_N[node] == NodeKind.COMPUTE:
            builder.add_compute(0, preds=preds, label=label, lane=lane)
        else:
            group_index, peer = int(trace.group_index_N[node]), int(trace.peer_N[node])
            builder.add_communication(
                CollectiveOp(int(trace.op_N[node])),
                int(trace.bytes_N[node]),
                group_index=group_index,
                peer=peer,
                tag=max(peer, 0) // len(trace.groups[group_index].ranks),
                preds=preds,
                label=label,
                lane=lane,
            )
        if any(p >= i for p in preds):
            raise UsageError(f"node {chain[-1]}: its chain cannot be put in order; use --no-fuse")
    return replace(builder.build(known_groups=()), rank=trace.rank)
