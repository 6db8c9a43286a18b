"""Collectives of several live ranks among virtual peers: as if the peers contributed the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.graph.node import CollectiveOp
from prismscale.payload.combine import combine, rows_for, stand_in, weights
from prismscale.payload.mirror import MirrorPayload

SIZE = 4
LIVE = (1, 3)
PAIRWISE = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def group(rank: int) -> GroupHandle:
    """Four ranks, seen by one of them."""
    return GroupHandle(group_index=0, ranks=(4, 5, 6, 7), group_rank=rank, name="", backend="gloo")


def contribution(member: int, shape: Sequence[int] = (SIZE, 2)) -> Tensor:
    """What a live member gives: small integers, different for each."""
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) * 5 + member + 1) % 11


def everybody(shape: Sequence[int] = (SIZE, 2)) -> list[Tensor]:
    """What all members give, virtual ones included."""
    return [contribution(stand_in(m, LIVE), shape) for m in range(SIZE)]


def run(
    op: CollectiveOp,
    inputs: dict[int, Sequence[Tensor]],
    outputs: Sequence[Tensor],
    *,
    rank: int = 3,
    root: int = -1,
    reduce_op: object = None,
) -> Sequence[Tensor]:
    """Combine on ``rank``; the peers' contributions arrive flat."""
    collective = Collective(
        op=op,
        group=group(rank),
        inputs=tuple(inputs[rank]),
        outputs=tuple(outputs),
        n_bytes=0,
        root=root,
        reduce_op=reduce_op,  # type: ignore[arg-type]
    )
    flat = {m: [t.clone().reshape(-1) for t in ts] for m, ts in inputs.items()}
    combine(collective, flat)
    return outputs


def exchange(
    inputs: dict[int, Sequence[Tensor]],
    outputs: Sequence[Tensor],
    splits: dict[int, Sequence[int]] | None = None,
    output_splits: Sequence[int] = (),
) -> None:
    """An all_to_all on rank 3, to which every live member gives its rows for it."""
    calls = {
        m: Collective(
            op=CollectiveOp.ALL_TO_ALL,
            group=group(m),
            inputs=tuple(ts),
            outputs=tuple(outputs),
            n_bytes=0,
            input_splits=splits[m] if splits else (),
            output_splits=output_splits,
        )
        for m, ts in inputs.items()
    }
    combine(calls[3], {m: [rows_for(c, 3)] for m, c in calls.items()})


def given_by(shape: Sequence[int] = (SIZE, 2)) -> dict[int, Sequence[Tensor]]:
    """One tensor of each live member."""
    return {m: [contribution(m, shape)] for m in LIVE}


@given(size=st.integers(1, 40), live=st.sets(st.integers(0, 39), min_size=1))
def test_everybody_is_stood_in_for_once(size: int, live: set[int]) -> None:
    """Live members by themselves, virtual ones by a live one."""
    members = sorted(m for m in live if m < size) or [0]
    share = weights(size, members)
    assert sum(share.values()) == size
    assert all(stand_in(m, members) == m for m in members)


@pytest.mark.parametrize("kind", PAIRWISE, ids=str)
def test_a_reduction_is_that_of_all_members(kind: object) -> None:
    """Sum, product, extremes and bits, two live members and two that repeat them."""
    (out,) = run(CollectiveOp.ALL_REDUCE, given_by(), [torch.empty(SIZE, 2).long()], reduce_op=kind)
    assert torch.equal(out, reduce(PAIRWISE[kind], everybody()))


def test_a_mean_is_that_of_all_members() -> None:
    """In floating point."""
    inputs = {m: [contribution(m).double()] for m in LIVE}
    out = torch.empty(SIZE, 2).double()
    run(CollectiveOp.ALL_REDUCE, inputs, [out], reduce_op=ReduceOp.AVG)
    assert torch.allclose(out, torch.stack(everybody()).double().mean(0))


@pytest.mark.parametrize("rank", LIVE)
def test_only_the_root_of_a_reduce_gets_it(rank: int) -> None:
    """The other keeps what it had."""
    out = torch.full((SIZE, 2), -1)
    run(CollectiveOp.REDUCE, given_by(), [out], rank=rank, root=3, reduce_op=ReduceOp.SUM)
    assert torch.equal(out, sum(everybody()) if rank == 3 else torch.full((SIZE, 2), -1))


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("rank", LIVE)
def test_reduce_scatter_gives_each_its_part(rank: int, as_list: bool) -> None:
    """From one flat tensor or a list of parts."""
    inputs = {m: list(ts[0]) if as_list else list(ts) for m, ts in given_by().items()}
    (out,) = run(CollectiveOp.REDUCE_SCATTER, inputs, [torch.empty(2).long()], rank=rank)
    assert torch.equal(out, sum(everybody())[rank])


@pytest.mark.parametrize("op", [CollectiveOp.ALL_GATHER, CollectiveOp.GATHER])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_gather_holds_every_member(op: CollectiveOp, as_list: bool) -> None:
    """In group order, into one tensor or a list."""
    out = torch.empty(SIZE, 3).long()
    run(op, given_by((3,)), list(out) if as_list else [out], root=3)
    assert torch.equal(out, torch.stack(everybody((3,))))


@pytest.mark.parametrize("op", [CollectiveOp.ALL_GATHER, CollectiveOp.GATHER])
def test_an_uneven_gather_cuts_and_fills_what_absent_members_would_give(op: CollectiveOp) -> None:
    """They repeat a live member: as much of it as fits, then zeros."""
    sizes = (1, 2, 5, 3)
    inputs: dict[int, Sequence[Tensor]] = {m: [torch.arange(sizes[m]) + 10 * m] for m in LIVE}
    outputs = run(op, inputs, [torch.full((n,), -1) for n in sizes], root=3)
    found = [output.tolist() for output in outputs]
    assert found == [[10], [10, 11], [10, 11, 0, 0, 0], [30, 31, 32]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.uint16, torch.bool], ids=str)
def test_a_mean_of_integers_is_cut_to_whole_numbers(dtype: torch.dtype) -> None:
    """Booleans stay what they are."""
    inputs = {m: [torch.tensor([m + 1, 1]).to(dtype)] for m in LIVE}
    (out,) = run(
        CollectiveOp.ALL_REDUCE, inputs, [torch.empty(2, dtype=dtype)], reduce_op=ReduceOp.AVG
    )
    # Three members give 2, and one gives 4.
    assert out.int().tolist() == ([1, 1] if dtype is torch.bool else [2, 1])


@pytest.mark.parametrize(("root", "source"), [(1, 1), (3, 3), (0, 1)])
def test_a_broadcast_gives_the_roots_values(root: int, source: int) -> None:
    """A live root's own, or those of the live rank that stands in for it."""
    (out,) = run(CollectiveOp.BROADCAST, given_by(), [torch.empty(SIZE, 2).long()], root=root)
    assert torch.equal(out, contribution(source))


def test_a_scatter_gives_each_its_chunk() -> None:
    """Rank 3 receives the fourth chunk of live root 1."""
    inputs = {1: list(contribution(1)), 3: []}
    (out,) = run(CollectiveOp.SCATTER, inputs, [torch.empty(2).long()], root=1)
    assert torch.equal(out, contribution(1)[3])


@pytest.mark.parametrize("as_list", [False, True])
def test_an_exchange_is_the_transpose(as_list: bool) -> None:
    """Row 3 of every member."""
    inputs = {m: list(ts[0]) if as_list else [ts[0]] for m, ts in given_by().items()}
    out = torch.empty(SIZE, 2).long()
    exchange(inputs, list(out) if as_list else [out.view(-1)])
    assert torch.equal(out, torch.stack([t[3] for t in everybody()]))


def test_members_of_an_exchange_send_as_many_rows_as_they_like() -> None:
    """Live rank 1 gives rank 3 two of its five rows; rank 3 keeps one of its own three; virtual
    members give what the live ones do that they follow."""
    splits = {1: (0, 3, 0, 2), 3: (1, 1, 0, 1)}
    inputs = {m: [torch.arange(2 * sum(s)).view(-1, 2) + 100 * m] for m, s in splits.items()}
    sent = {m: splits[stand_in(m, LIVE)][3] for m in range(SIZE)}
    out = torch.empty(sum(sent.values()), 2).long()
    exchange(inputs, [out], splits, output_splits=tuple(sent.values()))
    rows = {1: inputs[1][0][3:], 3: inputs[3][0][2:]}
    assert torch.equal(out, torch.cat([rows[stand_in(m, LIVE)] for m in range(SIZE)]))


def test_a_received_message_is_the_senders() -> None:
    """In the receiver's shape."""
    inputs: dict[int, Sequence[Tensor]] = {1: [contribution(1)], 3: []}
    (out,) = run(CollectiveOp.RECV, inputs, [torch.empty(SIZE, 2).long()], root=1)
    assert torch.equal(out, contribution(1))


FLOATS = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
INTEGERS = [torch.int64, torch.uint16, torch.bool]
CASES = [
    *((op, kind) for op in (ReduceOp.SUM, ReduceOp.MAX) for kind in (*FLOATS, *INTEGERS)),
    *((ReduceOp.PRODUCT, kind) for kind in (torch.float32, torch.float8_e4m3fn, torch.int64)),
    *((ReduceOp.AVG, kind) for kind in FLOATS),
    *((ReduceOp.BXOR, kind) for kind in INTEGERS),
]


@pytest.mark.parametrize(("reduce_op", "dtype"), CASES, ids=str)
def test_one_live_member_gets_what_the_mirror_gives(reduce_op: object, dtype: torch.dtype) -> None:
    """One arithmetic: with a single live rank every peer contributes what it does."""
    own = contribution(3).to(dtype)
    (alone,) = run(CollectiveOp.ALL_REDUCE, {3: [own]}, [own.clone()], reduce_op=reduce_op)
    mirrored = own.clone()
    call = Collective(
        op=CollectiveOp.ALL_REDUCE,
        group=group(3),
        inputs=(mirrored,),
        outputs=(mirrored,),
        n_bytes=0,
        reduce_op=ReduceOp(reduce_op),
    )
    MirrorPayload().fill(call)
    # Until torch 2.12 an 8-bit float that is too large is no number.
    torch.testing.assert_close(alone.float(), mirrored.float(), rtol=1 / 8, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16], ids=str)
def test_kinds_without_arithmetic_are_summed_too(dtype: torch.dtype) -> None:
    """Two live members, each for as many as it stands for; 8-bit floats have 3 bits after the
    point."""
    inputs = {m: [contribution(m).to(dtype)] for m in LIVE}
    output = inputs[3][0].clone()
    run(CollectiveOp.ALL_REDUCE, inputs, [output], reduce_op=ReduceOp.SUM)
    times = weights(SIZE, LIVE)
    expected = sum(times[m] * t[0].float() for m, t in inputs.items())
    torch.testing.assert_close(output.float(), expected, rtol=1 / 8, atol=0)
