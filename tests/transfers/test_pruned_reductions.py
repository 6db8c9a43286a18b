"""Pruned rings and trees give live members what the whole group would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.graph.node import CollectiveOp
from prismscale.payload.arithmetic import KIND
from prismscale.payload.recordings.remainders import exact
from prismscale.transfers.absent_neighbours import AbsentNeighbours
from prismscale.transfers.member import Member
from prismscale.transfers.schedule import Algorithm, Shape
from support.message_links import make

EXACT = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
ROUNDED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
KINDS = (KIND.SUM, KIND.AVG, KIND.MIN, KIND.MAX, KIND.PRODUCT, KIND.BAND, KIND.BOR, KIND.BXOR)


def is_reducible(dtype: torch.dtype, kind: Any) -> bool:
    """Whether gloo, or torch for it, reduces such tensors so."""
    if dtype.is_complex:
        return bool(kind == KIND.SUM)
    if kind in (KIND.BAND, KIND.BOR, KIND.BXOR):
        return not dtype.is_floating_point
    if kind == KIND.AVG:
        return dtype.is_floating_point
    return not (dtype is torch.bool and kind == KIND.PRODUCT)


class Recorded:
    """What all members contributed, and what came of it."""

    def __init__(self, contributions: list[torch.Tensor], kind: Any) -> None:
        self.contributions = contributions
        dtype = contributions[0].dtype
        wide = torch.float64 if dtype.is_floating_point else dtype
        total = exact([c.to(wide) for c in contributions], kind)
        self.total = (total / len(contributions) if kind == KIND.AVG else total).to(dtype)

    def result(self, start: int, stop: int) -> torch.Tensor:
        """A range of the result."""
        return self.total[start:stop]

    def contribution(self, member: int, start: int, stop: int) -> torch.Tensor:
        """A range of what a member put in."""
        return self.contributions[member][start:stop]


def contributions(size: int, numel: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """One tensor for each member."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size, numel)
    if dtype is torch.bool:
        return list(torch.randint(2, shape, generator=generator).bool())
    if dtype.is_floating_point or dtype.is_complex:
        return list(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
    return list(torch.randint(0, 7, shape, generator=generator).to(dtype))


def run_pruned(shape: Shape, recorded: Recorded, live: set[int], kind: Any) -> dict[int, Member]:
    """Live members among assistants."""
    members = {}
    for rank in live:
        data = recorded.contributions[rank].clone()
        members[rank] = Member(
            shape=shape,
            group_rank=rank,
            is_pruned=len(live) < shape.size,
            given=data,
            held=data,
            kind=kind,
        )
    stand_ins = {
        rank: AbsentNeighbours(
            shape=shape,
            receiver=rank,
            live=live,
            dtype=recorded.total.dtype,
            kind=kind,
            values=recorded,
        )
        for rank in live
    }
    make(members, stand_ins)
    return members


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_an_all_reduce_gives_live_members_the_groups_result(data: st.DataObject) -> None:
    """Any group of 2 to 64, any live members, any dtype and reduction, as a ring and as a tree."""
    size = data.draw(st.integers(2, 64))
    live = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=min(size, 12)))
    dtype = data.draw(st.sampled_from(EXACT + ROUNDED))
    kind = data.draw(st.sampled_from([k for k in KINDS if is_reducible(dtype, k)]))
    numel = data.draw(st.integers(1, 200))
    algorithm = data.draw(st.sampled_from(Algorithm))
    shape = Shape(op=CollectiveOp.ALL_REDUCE, size=size, numel=numel, algorithm=algorithm)
    recorded = Recorded(contributions(size, numel, dtype, size * 1000 + numel), kind)
    for member in run_pruned(shape, recorded, live, kind).values():
        if dtype in EXACT:
            assert torch.equal(member.held, recorded.total)
        else:
            scale = float(sum(c.abs().double() for c in recorded.contributions).max())
            if kind == KIND.PRODUCT:
                scale = float(recorded.total.abs().max())
            error = (member.held - recorded.total).abs().max()
            assert float(error) <= 4 * size * torch.finfo(dtype).eps * scale


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_live_members_move_the_bytes_of_the_whole_algorithm(data: st.DataObject) -> None:
    """A member sends and receives as much among assistants as in a group that is there."""
    size = data.draw(st.integers(2, 24))
    live = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    algorithm = data.draw(st.sampled_from(Algorithm))
    numel = data.draw(st.integers(1, 100))
    shape = Shape(op=CollectiveOp.ALL_REDUCE, size=size, numel=numel, algorithm=algorithm)
    recorded = Recorded(contributions(size, numel, torch.int64, numel), KIND.SUM)
    whole = run_pruned(shape, recorded, set(range(size)), KIND.SUM)
    pruned = run_pruned(shape, recorded, live, KIND.SUM)
    for rank in live:
        assert pruned[rank].sent_bytes == whole[rank].sent_bytes
        assert pruned[rank].received_bytes == whole[rank].received_bytes


def test_a_ring_moves_what_the_formula_says() -> None:
    """2 (K - 1) / K of the tensor, out and in."""
    shape = Shape(op=CollectiveOp.ALL_REDUCE, size=8, numel=800)
    recorded = Recorded(contributions(8, 800, torch.float32, 1), KIND.SUM)
    for member in run_pruned(shape, recorded, {2, 3}, KIND.SUM).values():
        assert member.sent_bytes == member.received_bytes == 2 * 7 * 100 * 4


def test_chunks_of_a_large_ring_travel_together() -> None:
    """A member of 8,192 sends no more messages than one of 64, and as many bytes as it should."""
    size, live = 8192, {0, 5000}
    shape = Shape(op=CollectiveOp.ALL_REDUCE, size=size, numel=2 * size)
    data = [torch.full((2 * size,), 1, dtype=torch.int64) for _ in range(size)]
    for member in run_pruned(shape, Recorded(data, KIND.SUM), live, KIND.SUM).values():
        assert torch.equal(member.held, torch.full((2 * size,), size))
        assert member.messages <= 4 * 64
        assert member.sent_bytes == 2 * (size - 1) * 2 * 8


@pytest.mark.parametrize("root", [0, 3, 6])
@pytest.mark.parametrize("live", [{0}, {3, 4}, {1, 6}])
def test_a_reduce_reaches_its_root(root: int, live: set[int]) -> None:
    """Chunks are summed around the ring, and sent to the root."""
    shape = Shape(op=CollectiveOp.REDUCE, size=7, numel=50, root=root)
    recorded = Recorded(contributions(7, 50, torch.int64, root), KIND.SUM)
    members = run_pruned(shape, recorded, live, KIND.SUM)
    if root in live:
        assert torch.equal(members[root].held, recorded.total)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_infinity_of_a_live_member_stays_one(bad: float) -> None:
    """What overflowed is no number on all of them, as a loss scaler wants to see."""
    shape = Shape(op=CollectiveOp.ALL_REDUCE, size=4, numel=8)
    given_ = contributions(4, 8, torch.float32, 5)
    given_[1][3] = bad
    recorded = Recorded(given_, KIND.SUM)
    for member in run_pruned(shape, recorded, {1, 2}, KIND.SUM).values():
        assert not torch.isfinite(member.held[3])
        assert torch.isfinite(member.held[:3]).all()


def test_a_product_with_a_zero_is_exact() -> None:
    """Nothing can be divided out of 0: what absent members contribute is multiplied."""
    shape = Shape(op=CollectiveOp.ALL_REDUCE, size=5, numel=4)
    given_ = contributions(5, 4, torch.float32, 6)
    given_[2][1] = 0.0
    recorded = Recorded(given_, KIND.PRODUCT)
    for member in run_pruned(shape, recorded, {2}, KIND.PRODUCT).values():
        assert torch.allclose(member.held, recorded.total)
