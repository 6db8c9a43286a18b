"""The groups of every rank, from what a few captured ranks saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.errors import GraphError
from prismscale.graph.assembly.groups import GroupTable, collect_groups
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.trace import GroupRecord, RankTrace
from support.jobs import mesh_groups


def seen_by(
    rank: int,
    world_size: int,
    own: Sequence[GroupRecord],
    known: Sequence[GroupRecord] | None = None,
) -> RankTrace:
    """A trace with nothing in it but groups."""
    builder = TraceBuilder(rank=rank, world_size=world_size, groups=own)
    return builder.build(known_groups=known)


def records(*groups: Sequence[int]) -> list[GroupRecord]:
    """Nameless groups."""
    return [GroupRecord(ranks=tuple(g)) for g in groups]


def collect(traces: Mapping[int, RankTrace], represented: Sequence[int]) -> GroupTable:
    """The table of all ranks, given which captured rank stands for each."""
    return collect_groups(traces, len(represented), np.array(represented))


def groups_of(table: GroupTable, rank: int) -> list[tuple[int, ...]]:
    """Groups of ``rank`` by group index."""
    return [table.ranks[g] for g in table.of_rank(rank)]


@st.composite
def meshes(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, int]]:
    """A mesh whose axes are nested in any order, and the order in which groups are made."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    mesh = (
        np.arange(int(np.prod(shape)))
        .reshape(shape)
        .transpose(draw(st.permutations(range(len(shape)))))
    )
    return mesh, {f"axis{a}": a for a in draw(st.permutations(range(len(shape))))}


@given(meshes(), st.data())
@settings(max_examples=150, deadline=None)
def test_one_rank_that_saw_only_its_own_groups_tells_all(
    made: tuple[np.ndarray, dict[str, int]], data: st.DataObject
) -> None:
    """Groups of a mesh are moved to every rank, whichever ranks were captured."""
    truth = mesh_groups(*made)
    size = made[0].size
    captured = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3, unique=True))
    traces = {c: seen_by(c, size, [g for g in truth if c in g.ranks]) for c in captured}
    represented = [r if r in captured else captured[r % len(captured)] for r in range(size)]

    table = collect(traces, represented)

    for rank in range(size):
        assert groups_of(table, rank) == [g.ranks for g in truth if rank in g.ranks]


def test_irregular_groups_are_known_from_who_saw_them() -> None:
    """A group without a stride, such as first and last stage, needs one rank that saw it made."""
    all_groups = records(range(6), (0, 1, 5), (2, 3, 4))
    trace = seen_by(0, 6, [all_groups[0], all_groups[1]], all_groups)

    table = collect({0: trace}, [0] * 6)

    assert groups_of(table, 3) == [tuple(range(6)), (2, 3, 4)]
    assert table.group_rank(4, 1) == 2


def test_two_groups_of_the_same_ranks_stay_two() -> None:
    """A second group of the same ranks is another group, with its own group index."""
    twice = records((0, 1), (0, 1), (0, 1))

    table = collect({0: seen_by(0, 2, twice)}, [0, 0])

    assert table.of_rank(1) == (0, 1, 2)


def test_roles_follow_creation_order_not_capture_order() -> None:
    """Rank 3 made its row before its column; that rank 0 told of the column first is no reason to
    swap its group indices."""
    world, row0, row1, column0, column1 = records(range(4), (0, 1), (2, 3), (0, 2), (1, 3))
    traces = {
        1: seen_by(1, 4, [world, row0, column1]),
        3: seen_by(3, 4, [world, row1, column1]),
        0: seen_by(0, 4, [world, row0, column0]),
        2: seen_by(2, 4, [world, row1, column0]),
    }

    table = collect(traces, [0, 1, 2, 3])

    assert groups_of(table, 3) == [world.ranks, row1.ranks, column1.ranks]


def test_contradictory_creation_orders_are_refused() -> None:
    """Two ranks that made two common groups in opposite order would hang a real job too."""
    world, red, blue = records((0, 1, 2), (0, 1), (0, 1, 2))
    traces = {0: seen_by(0, 3, [world, red, blue]), 1: seen_by(1, 3, [world, blue, red])}

    with pytest.raises(GraphError, match=r"created first, .*\[0, 1\].* in the same order"):
        collect(traces, [0, 1, 0])


def test_rank_whose_groups_cannot_be_known_is_named() -> None:
    """Where translation is impossible the message names the rank to capture."""
    world, odd = records(range(4), (0, 1, 3))

    with pytest.raises(GraphError, match=r"rank 2 is taken .* its program differs"):
        collect({0: seen_by(0, 4, [world, odd])}, [0] * 4)


def test_names_of_moved_groups_are_kept() -> None:
    """A group found by translation has the name of the one it was translated from."""
    world, row = GroupRecord(ranks=(0, 1, 2, 3), name="world"), GroupRecord(ranks=(0, 1), name="tp")

    table = collect({0: seen_by(0, 4, [world, row])}, [0] * 4)

    assert table.names == ("world", "tp", "tp")
