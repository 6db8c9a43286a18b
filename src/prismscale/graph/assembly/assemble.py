"""Assembles the graph of the whole job from a few captured traces: classes, families, slots.

The input says which captured rank stands for each rank, and which groups every rank has. Classes
are found by colour refinement. Ranks start with the colour of their trace and of their position in
groups that carry point-to-point traffic: lockstep along a pipeline would deadlock, because the
receive of stage ``s`` needs the earlier send of stage ``s - 1``. A group's colour is the sequence
of its members' colours, and a rank takes on the colours of its groups. This repeats until nothing
splits any more. Then every group index of a class leads to groups of one colour, and these groups
are a family. Before the refinement, messages are moved to groups no larger than they need; after
it, the prologues of all traces are brought to end at the same step.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import GraphError
from prismscale.graph.assembly.align import aligned
from prismscale.graph.assembly.groups import GroupTable
from prismscale.graph.assembly.narrowed import narrowed
from prismscale.graph.job_graph import Coverage, GroupFamily, GroupSlot, JobGraph, RankClass
from prismscale.graph.pipeline import message_groups
from prismscale.graph.trace import RankTrace


def assemble(
    traces: Mapping[int, RankTrace],
    representative_R: NDArray[np.int64],
    groups: GroupTable,
    *,
    alone: Collection[int] = (),
    meta: Mapping[str, str] | None = None,
) -> JobGraph:
    """Build the execution graph of all ranks.

    Args:
        traces: by captured rank.
        representative_R: for every rank, the captured rank whose trace it runs (a captured rank may
            be represented by another one that was found to run the same program).
        groups: the groups of every rank, by group index.
        alone: ranks that each get a class of their own (live ranks).
        meta: provenance to store with the graph.

    Raises:
        GraphError: a representative was not captured.
    """
    world_size = len(representative_R)
    used = sorted(set(representative_R.tolist()))
    missing = [r for r in used if r not in traces]
    if missing:
        raise GraphError(f"ranks {missing[:8]} represent others but were not captured")
    traces, groups = narrowed(traces, representative_R, groups)
    group_members = _members(groups)
    colour_R = _refine(
        _initial_colours(traces, representative_R, groups, alone), group_members, groups
    )
    families, family_of = _families(colour_R, group_members, groups)
    classes = []
    for colour in range(int(colour_R.max()) + 1):
        members = np.flatnonzero(colour_R == colour)
        # Ranks of one colour have one representative, because their initial colours include it.
        trace = traces[int(representative_R[members[0]])]
        slots = tuple(
            _slot(members, group_index, groups, families, family_of)
            for group_index in range(len(trace.groups))
        )
        classes.append(RankClass(index=colour, trace=trace, members_M=members, slots=slots))
    graph = JobGraph(
        world_size=world_size,
        classes=tuple(classes),
        families=tuple(families),
        coverage=tuple(_coverage(c, traces) for c in classes),
        meta=dict(meta or {}),
    )
    # This comes last because channels, whose uses must agree, are defined by families.
    return aligned(graph)


def _initial_colours(
    traces: Mapping[int, RankTrace],
    representative_R: NDArray[np.int64],
    groups: GroupTable,
    alone: Collection[int],
) -> NDArray[np.int64]:
    messages = {r: message_groups(traces[r]) for r in set(representative_R.tolist())}
    keys: list[Hashable] = []
    for rank, representative in enumerate(representative_R.tolist()):
        # Lockstep along a pipeline would deadlock, so its stages have different colours at once.
        positions = tuple(
            groups.group_rank(rank, group_index) for group_index in messages[representative]
        )
        keys.append((representative, positions, rank if rank in alone else -1))
    return _intern(keys)


def _refine(
    colour_R: NDArray[np.int64], members: Sequence[_Members], groups: GroupTable
) -> NDArray[np.int64]:
    while True:
        group_colours = _group_colours(colour_R, members)
        keys: list[Hashable] = [
            (colour, tuple(group_colours[g] for g in groups.of_rank(rank)))
            for rank, colour in enumerate(colour_R.tolist())
        ]
        finer = _intern(keys)
        # Refinement only splits colours, so an unchanged number means that none was split.
        if finer.max() == colour_R.max():
            return finer
        colour_R = finer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Members:
    """The members of one group, and the group index that the group has for each of them."""

    ranks_K: NDArray[np.int64]
    group_indices: bytes


def _members(groups: GroupTable) -> list[_Members]:
    group_index_K = [np.zeros(len(ranks), dtype=np.int16) for ranks in groups.ranks]
    for rank, own in enumerate(groups.groups_R):
        for group_index, (g, position) in enumerate(
            zip(own, groups.positions_R[rank], strict=True)
        ):
            group_index_K[g][position] = group_index
    return [
        _Members(ranks_K=np.asarray(ranks), group_indices=group_indices.tobytes())
        for ranks, group_indices in zip(groups.ranks, group_index_K, strict=True)
    ]


def _group_colours(colour_R: NDArray[np.int64], members: Sequence[_Members]) -> list[int]:
    """Return a colour for each group, equal for groups whose members are alike.

    Members are alike if they have the same colours, and the same group index for this group: if
    groups overlap like links of a ring, one is the first group of this rank and the second of the
    next. Bytes are a much cheaper dictionary key than a tuple of 65,536 numbers.
    """
    ids: dict[tuple[bytes, bytes], int] = {}
    keys = ((colour_R[m.ranks_K].tobytes(), m.group_indices) for m in members)
    return [ids.setdefault(key, len(ids)) for key in keys]


def _intern(keys: Sequence[Hashable]) -> NDArray[np.int64]:
    """Number keys in order of first appearance, so class 0 holds rank 0."""
    ids: dict[Hashable, int] = {}
    return np.array([ids.setdefault(k, len(ids)) for k in keys], dtype=np.int64)


def _families(
    colour_R: NDArray[np.int64], members: Sequence[_Members], groups: GroupTable
) -> tuple[list[GroupFamily], dict[int, tuple[int, int]]]:
    """Return the families, and for each group its (family, index within the family)."""
    alike: dict[int, list[int]] = {}
    for g, colour in enumerate(_group_colours(colour_R, members)):
        alike.setdefault(colour, []).append(g)
    families: list[GroupFamily] = []
    family_of: dict[int, tuple[int, int]] = {}
    for ids in alike.values():
        table = np.array([groups.ranks[g] for g in ids], dtype=np.int64).T
        families.append(GroupFamily(index=len(families), name=groups.names[ids[0]], ranks_KG=table))
        for column, g in enumerate(ids):
            family_of[g] = (len(families) - 1, column)
    return families, family_of


def _slot(
    members: NDArray[np.int64],
    group_index: int,
    groups: GroupTable,
    families: Sequence[GroupFamily],
    family_of: Mapping[int, tuple[int, int]],
) -> GroupSlot:
    places = [family_of[groups.of_rank(rank)[group_index]] for rank in members.tolist()]
    # Refinement gave the groups of all members one colour, so they are in one family.
    family = places[0][0]
    group_M = np.array([column for _, column in places], dtype=np.int64)
    position_M = np.array(
        [groups.group_rank(r, group_index) for r in members.tolist()], dtype=np.int64
    )
    same = bool((position_M == position_M[0]).all())
    return GroupSlot(
        family=family,
        slot_M=position_M * families[family].n_groups + group_M,
        group_M=group_M,
        group_rank=int(position_M[0]) if same else -1,
    )


def _coverage(rank_class: RankClass, traces: Mapping[int, RankTrace]) -> Coverage:
    captured = tuple(r for r in rank_class.members_M.tolist() if r in traces)
    return Coverage(
        class_index=rank_class.index, captured=captured, assumed=rank_class.size - len(captured)
    )
