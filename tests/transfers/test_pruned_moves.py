"""What is moved and not reduced reaches live members as it would in the whole group."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.graph.node import CollectiveOp
from prismscale.transfers.absent_neighbours import AbsentNeighbours
from prismscale.transfers.member import Member
from prismscale.transfers.schedule import Shape, received_numel, sent_numel
from support.message_links import make


class Ended:
    """What a live member ends with."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def result(self, start: int, stop: int) -> torch.Tensor:
        """A range of it."""
        return self.held[start:stop]

    def contribution(self, member: int, start: int, stop: int) -> torch.Tensor:
        """Nothing is reduced."""
        raise AssertionError(f"contribution of {member}, {start} to {stop}")


def run(
    shapes: dict[int, Shape], starts: dict[int, list[torch.Tensor]], ends: list[torch.Tensor]
) -> None:
    """Live members, from ``given`` and ``held`` of each, among assistants."""
    live = set(shapes)
    members, absent = {}, {}
    for rank, shape in shapes.items():
        given_, held = starts[rank]
        is_pruned = len(live) < shape.size
        members[rank] = Member(
            shape=shape, group_rank=rank, is_pruned=is_pruned, given=given_, held=held
        )
        absent[rank] = AbsentNeighbours(
            shape=shape, receiver=rank, live=live, dtype=held.dtype, values=Ended(ends[rank])
        )
    make(members, absent)
    for rank, member in members.items():
        assert torch.equal(member.held, ends[rank])
        assert member.sent_bytes == sent_numel(shapes[rank], rank) * 8
        assert member.received_bytes == received_numel(shapes[rank], rank) * 8


def some_live(data: st.DataObject, size: int) -> set[int]:
    """Any live members."""
    return data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=min(size, 10)))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_all_gather_reaches_live_members(data: st.DataObject) -> None:
    """Everybody's part, around a ring."""
    size, n = data.draw(st.integers(2, 64)), data.draw(st.integers(1, 9))
    whole = torch.arange(size * n)
    shape = Shape(op=CollectiveOp.ALL_GATHER, size=size, numel=size * n)
    starts = {}
    for rank in some_live(data, size):
        held = torch.full((size * n,), -1)
        held[rank * n : (rank + 1) * n] = whole[rank * n : (rank + 1) * n]
        starts[rank] = [held, held]
    run(dict.fromkeys(starts, shape), starts, [whole] * size)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_broadcast_reaches_live_members(data: st.DataObject) -> None:
    """From any root, live or absent, through a tree."""
    size = data.draw(st.integers(2, 64))
    root = data.draw(st.integers(0, size - 1))
    said = torch.arange(7) + 1
    shape = Shape(op=CollectiveOp.BROADCAST, size=size, numel=7, root=root)
    starts = {}
    for rank in some_live(data, size):
        held = said.clone() if rank == root else torch.zeros(7, dtype=torch.int64)
        starts[rank] = [held, held]
    run(dict.fromkeys(starts, shape), starts, [said] * size)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_all_to_all_reaches_live_members(data: st.DataObject) -> None:
    """Uneven splits, some of them empty."""
    size = data.draw(st.integers(2, 16))
    counts = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.integers(0, 4), min_size=size, max_size=size),
                min_size=size,
                max_size=size,
            )
        )
    )
    rows = [
        [torch.full((int(counts[a, b]),), 100 * a + b) for b in range(size)] for a in range(size)
    ]
    ends = [torch.cat([rows[a][b] for a in range(size)]) for b in range(size)]
    shapes, starts = {}, {}
    for rank in some_live(data, size):
        shapes[rank] = Shape(
            op=CollectiveOp.ALL_TO_ALL,
            size=size,
            numel=len(ends[rank]),
            send_splits=tuple(counts[rank].tolist()),
            receive_splits=tuple(counts[:, rank].tolist()),
        )
        held = torch.full_like(ends[rank], -1)
        before = int(counts[:rank, rank].sum())
        held[before : before + int(counts[rank, rank])] = rows[rank][rank]
        starts[rank] = [torch.cat(rows[rank]), held]
    run(shapes, starts, ends)


def test_broadcast_trees_have_logarithmic_depth_and_no_waste() -> None:
    """Everybody but the root receives once; together they send as often."""
    for size in (2, 3, 8, 64, 100):
        shape = Shape(op=CollectiveOp.BROADCAST, size=size, numel=1, root=size // 2)
        received = [received_numel(shape, m) for m in range(size)]
        sent = [sent_numel(shape, m) for m in range(size)]
        assert received == [int(m != size // 2) for m in range(size)]
        assert sum(sent) == size - 1
        assert max(sent) <= size.bit_length()
