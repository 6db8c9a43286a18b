"""Values of absent peers: mirror, recorded, rules, and their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed import ReduceOp

from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.errors import FormatError
from prismscale.graph.node import CollectiveOp
from prismscale.payload.mirror import CompositePayload, MirrorPayload
from prismscale.payload.recorded import NoObjects, RecordedPayload

SIZE, RANK = 4, 1
MIRROR = MirrorPayload()


def _collective(op: CollectiveOp, inputs: Any = (), outputs: Any = (), **fields: Any) -> Collective:
    rank, group_index = fields.pop("rank", RANK), fields.pop("group_index", 0)
    ranks = fields.pop("ranks", tuple(range(fields.pop("size", SIZE))))
    group = GroupHandle(
        group_index=group_index, ranks=ranks, group_rank=rank, name="", backend="gloo"
    )
    return Collective(
        op=op, group=group, inputs=tuple(inputs), outputs=tuple(outputs), n_bytes=0, **fields
    )


def _all_reduced(tensor: torch.Tensor, op: Any = ReduceOp.SUM, size: int = SIZE) -> torch.Tensor:
    reduce_op = op if type(op) is ReduceOp else ReduceOp(op)
    MIRROR.fill(
        _collective(CollectiveOp.ALL_REDUCE, [tensor], [tensor], reduce_op=reduce_op, size=size)
    )
    return tensor


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_multiplies_by_the_groups_size(dtype: torch.dtype) -> None:
    """SUM over equal ranks is the tensor times K, in every dtype and layout."""
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(dtype).t()
    reduced = _all_reduced(tensor).to(torch.complex64)
    assert reduced.real.tolist() == [[4.0, 12.0], [8.0, 16.0]]


@pytest.mark.parametrize("op", ["AVG", "MIN", "MAX"])
def test_idempotent_reductions_leave_the_tensor(op: str) -> None:
    """Reductions of equal values that give the value itself."""
    assert _all_reduced(torch.tensor([3.0, -2.0]), getattr(ReduceOp, op)).tolist() == [3.0, -2.0]


def test_other_reductions_follow_their_arithmetic() -> None:
    """PRODUCT is a power, BXOR cancels in pairs, PREMUL_SUM scales first, bools stay."""
    assert _all_reduced(torch.tensor([2.0, 3.0]), ReduceOp.PRODUCT).tolist() == [16.0, 81.0]
    assert _all_reduced(torch.tensor([6]), ReduceOp.BXOR).tolist() == [0]
    assert _all_reduced(torch.tensor([6]), ReduceOp.BXOR, size=3).tolist() == [6]
    assert _all_reduced(torch.tensor([5]), ReduceOp.BAND).tolist() == [5]
    assert _all_reduced(torch.tensor([2.0]), _make_nccl_premul_sum(0.5)).tolist() == [4.0]
    assert _all_reduced(torch.tensor([True, False])).tolist() == [True, False]


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1), st.integers(1, 9))
def test_sum_equals_adding_copies(values: list[int], size: int) -> None:
    """The mirror of SUM is what adding K copies gives."""
    assert _all_reduced(torch.tensor(values), size=size).tolist() == [v * size for v in values]


def test_writes_are_invisible_to_autograd() -> None:
    """A filled tensor keeps its version, so saved activations stay valid, and needs no no_grad."""
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * leaf
    version = leaf._version
    _all_reduced(leaf)
    assert leaf._version == version
    product.sum().backward()
    with torch.inference_mode():
        frozen = torch.ones(2)
    assert _all_reduced(frozen).tolist() == [4.0, 4.0]


def test_meta_tensors_are_left_alone() -> None:
    """Tensors without values stay without values."""
    assert _all_reduced(torch.empty(3, device="meta")).is_meta


@pytest.mark.parametrize("shape", [(8, 3), (4, 2, 3)])
def test_all_gather_repeats_the_input(shape: tuple[int, ...]) -> None:
    """A flat all_gather holds the input K times, concatenated or stacked."""
    source, output = torch.randn(2, 3), torch.full(shape, torch.nan)
    MIRROR.fill(_collective(CollectiveOp.ALL_GATHER, [source], [output]))
    assert torch.equal(output.view(4, 2, 3), source.expand(4, 2, 3))


def test_all_gather_in_place_keeps_its_own_slot() -> None:
    """An input that is its own slot of the output is gathered in place, as FSDP does."""
    output = torch.full((8,), torch.nan)
    source = output[2:4]
    source.copy_(torch.tensor([1.0, 2.0]))
    MIRROR.fill(_collective(CollectiveOp.ALL_GATHER, [source], [output]))
    assert output.tolist() == [1.0, 2.0] * 4


def test_uneven_all_gather_cuts_and_fills() -> None:
    """Members of other sizes hold as much of the input as fits, then zeros."""
    outputs = [torch.full((n,), torch.nan) for n in (1, 2, 3, 2)]
    MIRROR.fill(_collective(CollectiveOp.ALL_GATHER, [torch.tensor([1.0, 2.0])], outputs))
    assert [o.tolist() for o in outputs] == [[1.0], [1.0, 2.0], [1.0, 2.0, 0.0], [1.0, 2.0]]


@pytest.mark.parametrize(("op", "factor"), [(ReduceOp.SUM, 4), (ReduceOp.AVG, 1)])
def test_reduce_scatter_reduces_the_own_chunk(op: Any, factor: int) -> None:
    """Each rank gets its own chunk of the input, reduced over equal ranks; lists alike."""
    source = torch.arange(8.0)
    flat, listed = torch.full((2,), torch.nan), torch.full((2,), torch.nan)
    fields = {"reduce_op": ReduceOp(op)}
    MIRROR.fill(_collective(CollectiveOp.REDUCE_SCATTER, [source], [flat], **fields))
    MIRROR.fill(_collective(CollectiveOp.REDUCE_SCATTER, source.chunk(4), [listed], **fields))
    assert flat.tolist() == listed.tolist() == [2.0 * factor, 3.0 * factor]


def test_all_to_all_sends_everyone_the_same() -> None:
    """Every member sends what this rank sends to itself, flat or listed."""
    source, output = torch.arange(8.0), torch.full((8,), torch.nan)
    MIRROR.fill(_collective(CollectiveOp.ALL_TO_ALL, [source], [output]))
    assert output.tolist() == [2.0, 3.0] * 4
    outputs = [torch.full((2,), torch.nan) for _ in range(4)]
    MIRROR.fill(_collective(CollectiveOp.ALL_TO_ALL, source.chunk(4), outputs))
    assert torch.cat(outputs).tolist() == output.tolist()


@pytest.mark.parametrize(
    ("input_splits", "expected"), [((1, 2, 0, 1), [1, 1, 2, 1, 2, 1, 1]), ((4, 0, 0, 0), [0] * 7)]
)
def test_uneven_all_to_all_cycles_the_own_rows(
    input_splits: tuple[int, ...], expected: list[int]
) -> None:
    """Each member's rows are the rows for this rank in a cycle; zeros where it sends none."""
    source, output = torch.arange(4).view(4, 1), torch.full((7, 1), -1)
    splits = {"input_splits": input_splits, "output_splits": (1, 2, 3, 1)}
    MIRROR.fill(_collective(CollectiveOp.ALL_TO_ALL, [source], [output], **splits))
    assert output.flatten().tolist() == expected


def test_rooted_collectives_fill_the_root_only() -> None:
    """reduce and gather change the root's outputs and nobody else's."""
    for root, expected in ((RANK, 4.0), (0, 1.0)):
        tensor = torch.ones(1)
        MIRROR.fill(_collective(CollectiveOp.REDUCE, [tensor], [tensor], root=root))
        assert tensor.item() == expected
    outputs = [torch.full((1,), torch.nan) for _ in range(4)]
    MIRROR.fill(_collective(CollectiveOp.GATHER, [torch.ones(1)], outputs, root=RANK))
    assert torch.cat(outputs).tolist() == [1.0] * 4


def test_broadcast_from_an_absent_root_keeps_what_is_plausible() -> None:
    """Agreeing ranks see their own values; what only stray memory holds becomes zero."""
    floats = torch.tensor([1.0, torch.nan, -torch.inf])
    tiny = torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)
    numbers = torch.tensor([7, 1 << 45, -(1 << 60), -(1 << 63)])
    for tensor in (floats, tiny, numbers):
        MIRROR.fill(_collective(CollectiveOp.BROADCAST, [tensor], [tensor], root=0))
    assert floats.tolist() == [1.0, 0.0, 0.0]
    assert tiny.float().tolist() == [1.0, 0.0]
    assert numbers.tolist() == [7, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES[:7], ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 50_000)])
def test_received_floats_are_small_finite_and_repeatable(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """An absent sender's floats look like initialised weights and are the same each time."""
    first, second = (torch.full(shape, torch.nan, dtype=torch.float32).to(dtype) for _ in "ab")
    for tensor in (first, second.t() if len(shape) > 1 else second):
        MIRROR.fill(_collective(CollectiveOp.RECV, (), [tensor], root=0))
    wide = torch.view_as_real(first) if first.is_complex() else first.float()
    assert wide.isfinite().all()
    assert 0 < wide.std() < 0.05
    assert second.to(torch.complex64).isfinite().all()


def test_received_integers_are_zero() -> None:
    """An absent sender's integers and flags cannot steer anything."""
    for dtype in (torch.int64, torch.uint8, torch.bool):
        tensor = torch.ones(3, dtype=dtype)
        MIRROR.fill(_collective(CollectiveOp.RECV, (), [tensor], root=0))
        assert not tensor.any()


def test_stages_alone_agree_on_their_own_vote() -> None:
    """Of torch's vote on shapes an absent stage says what this one said, in both directions."""

    def _warmup_forward_vote(flag: torch.Tensor) -> None:
        MIRROR.fill(_collective(CollectiveOp.RECV, (), [flag], root=0))
        MIRROR.fill(_collective(CollectiveOp.SEND, [flag], (), root=2))

    def _warmup_backward_result(flag: torch.Tensor) -> None:
        MIRROR.fill(_collective(CollectiveOp.RECV, (), [flag], root=2))

    forward, backward = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    _warmup_forward_vote(forward)
    _warmup_backward_result(backward)
    assert (int(forward), int(backward)) == (1, 1)


def test_scatter_gives_the_roots_part() -> None:
    """A root scatters what it has; elsewhere the output is defined."""
    output = torch.full((2,), torch.nan)
    MIRROR.fill(_collective(CollectiveOp.SCATTER, torch.arange(8.0).chunk(4), [output], root=RANK))
    assert output.tolist() == [2.0, 3.0]
    MIRROR.fill(_collective(CollectiveOp.SCATTER, (), [output.fill_(torch.nan)], root=0))
    assert output.isfinite().all()


def test_receiving_leaves_the_programs_random_numbers() -> None:
    """The program's own random numbers do not depend on what peers send."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    MirrorPayload().fill(_collective(CollectiveOp.RECV, (), [torch.empty(9)], root=0))
    assert torch.equal(torch.rand(2), expected)


class Tokens:
    """Knows what a message brings, and nothing else."""

    def offer(self, collective: Collective) -> bool:
        """Fill the outputs of a receive."""
        if collective.op is not CollectiveOp.RECV:
            return False
        collective.outputs[0].fill_(42)
        return True


def test_rules_come_first_then_the_rest() -> None:
    """The first rule that knows a communication answers it; the mirror takes what is left."""
    payload = CompositePayload([Tokens()], MIRROR)
    received, reduced = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    payload.fill(_collective(CollectiveOp.RECV, (), [received], root=0))
    payload.fill(_collective(CollectiveOp.ALL_REDUCE, [reduced], [reduced]))
    assert (received.item(), reduced.item()) == (42, 4.0)


def _broadcast(rank: int, tensor: torch.Tensor, **fields: Any) -> Collective:
    return _collective(CollectiveOp.BROADCAST, [tensor], [tensor], root=0, rank=rank, **fields)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_recorded_broadcasts_reach_ranks_that_run_later(tmp_path: Path, dtype: torch.dtype) -> None:
    """What a captured root broadcasts is what a rank captured later receives, in order."""
    sent = [torch.tensor([[0, 1]]).to(dtype), torch.tensor([1, 1, 0]).to(dtype)]
    root = RecordedPayload(tmp_path)
    assert not any(root.offer(_broadcast(0, tensor)) for tensor in sent)
    other = RecordedPayload(tmp_path)
    received = [torch.empty_like(tensor) for tensor in sent]
    assert all(other.offer(_broadcast(2, tensor)) for tensor in received)
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))


def test_recordings_are_shared_by_role(tmp_path: Path) -> None:
    """A group whose own root was not captured takes the value of another group of its group
    index."""
    RecordedPayload(tmp_path).offer(_broadcast(0, torch.tensor([7]), group_index=2, ranks=(0, 1)))
    received = torch.tensor([0])
    reader = RecordedPayload(tmp_path)
    assert reader.offer(_broadcast(1, received, group_index=2, ranks=(6, 7)))
    assert received.item() == 7
    assert not reader.offer(_broadcast(1, received, group_index=1, ranks=(6, 7)))


def test_recorded_scatters_and_sends_reach_their_receiver(tmp_path: Path) -> None:
    """A scatter is read at the receiver's place, a send by the rank it was sent to."""
    parts = [torch.tensor([k]) for k in range(4)]
    sender = RecordedPayload(tmp_path)
    output = torch.tensor([0])
    sender.offer(_collective(CollectiveOp.SCATTER, parts, [output], root=0, rank=0))
    sender.offer(_collective(CollectiveOp.SEND, [torch.tensor([9])], root=3, rank=0))
    reader = RecordedPayload(tmp_path)
    assert reader.offer(_collective(CollectiveOp.SCATTER, (), [output], root=0, rank=3))
    message = torch.tensor([0])
    assert reader.offer(_collective(CollectiveOp.RECV, (), [message], root=0, rank=3))
    assert (output.item(), message.item()) == (3, 9)


def test_floats_and_large_tensors_are_not_recorded(tmp_path: Path) -> None:
    """Only small integers are kept; counting goes on past the others."""
    root = RecordedPayload(tmp_path)
    for tensor in (torch.ones(2), torch.zeros(1 << 18, dtype=torch.int64), torch.tensor([5])):
        root.offer(_broadcast(0, tensor))
    assert [path.name for path in tmp_path.iterdir()] == ["broadcast.r0.s0.n2.g0.bin"]


def test_another_shape_is_not_taken(tmp_path: Path) -> None:
    """A recording that does not fit leaves the decision to the next source."""
    RecordedPayload(tmp_path).offer(_broadcast(0, torch.tensor([5, 6])))
    tensor = torch.tensor([1])
    assert not RecordedPayload(tmp_path).offer(_broadcast(1, tensor))
    assert tensor.item() == 1


def test_where_another_rule_knows_only_the_sender_itself_is_believed(tmp_path: Path) -> None:
    """An older message, or that of another group, may be about something else."""

    def message(op: CollectiveOp, tensor: torch.Tensor, ranks: tuple[int, int]) -> Collective:
        tensors = ([tensor], ()) if op is CollectiveOp.SEND else ((), [tensor])
        rank, peer = (0, 1) if op is CollectiveOp.SEND else (1, 0)
        return _collective(op, *tensors, root=peer, rank=rank, ranks=ranks)

    RecordedPayload(tmp_path).offer(message(CollectiveOp.SEND, torch.tensor([9]), (0, 4)))
    own = RecordedPayload(tmp_path, objects=NoObjects(knows_object=True))
    other = RecordedPayload(tmp_path, objects=NoObjects(knows_object=True))
    received = torch.tensor([0])
    assert not other.offer(message(CollectiveOp.RECV, received, (3, 7)))
    assert own.offer(message(CollectiveOp.RECV, received, (0, 4)))
    assert received.item() == 9
    assert not own.offer(message(CollectiveOp.RECV, received, (0, 4)))


def test_what_nobody_knows_is_waited_for_from_rank_0(tmp_path: Path) -> None:
    """The receiver's own root is not captured; rank 0, which is, is a moment later."""
    asked: list[int] = []

    def is_captured_now(rank: int) -> bool:
        asked.append(rank)
        if rank == 0:
            RecordedPayload(tmp_path).offer(_broadcast(0, torch.tensor([7]), ranks=(0, 1)))
        return rank == 0

    reader = RecordedPayload(
        tmp_path, is_captured_now=is_captured_now, objects=NoObjects(lacks_object=True)
    )
    received = torch.tensor([0])
    assert reader.offer(_broadcast(1, received, ranks=(6, 7)))
    assert received.item() == 7
    assert set(asked) == {6, 0}


def test_objects_are_numbered_apart_from_tensors(tmp_path: Path) -> None:
    """Groups may differ in how many tensors they broadcast before an object."""
    calling = NoObjects(is_calling=True)
    RecordedPayload(tmp_path, objects=calling).offer(_broadcast(0, torch.tensor([7]), ranks=(0, 1)))
    reader = RecordedPayload(tmp_path)
    assert not reader.offer(_broadcast(1, torch.zeros(2), ranks=(6, 7)))
    reader = RecordedPayload(tmp_path, objects=calling)
    received = torch.tensor([0])
    assert reader.offer(_broadcast(1, received, ranks=(6, 7)))
    assert received.item() == 7


def test_a_rank_that_runs_longer_takes_the_newest_value(tmp_path: Path) -> None:
    """What the sender sent last stands for what it would have sent in later steps."""
    root = RecordedPayload(tmp_path)
    for value in (3, 4):
        root.offer(_broadcast(0, torch.tensor([value])))
    reader, received = RecordedPayload(tmp_path), torch.tensor([0])
    seen = []
    for _ in range(3):
        assert reader.offer(_broadcast(1, received))
        seen.append(received.item())
    assert seen == [3, 4, 4]


def test_a_receiver_waits_for_a_sender_that_is_being_captured(tmp_path: Path) -> None:
    """The value comes while the receiver polls."""
    polls = []

    def is_captured_now(rank: int) -> bool:
        polls.append(rank)
        if len(polls) == 3:
            RecordedPayload(tmp_path).offer(_broadcast(0, torch.tensor([8])))
        return True

    received = torch.tensor([0])
    reader = RecordedPayload(tmp_path, is_captured_now=is_captured_now)
    assert reader.offer(_broadcast(1, received))
    assert (received.item(), polls) == (8, [0, 0, 0])


@pytest.mark.parametrize("content", [b"", b"not json\n", b'[{"dtype": "int64", "shape": [4]}]\nxx'])
def test_damaged_recordings_are_refused(tmp_path: Path, content: bytes) -> None:
    """A damaged file is named and its mend said."""
    (tmp_path / "broadcast.r0.s0.n0.g0.bin").write_bytes(content)
    with pytest.raises(FormatError, match=r"broadcast\.r0\.s0\.n0\.g0\.bin.*capture again"):
        RecordedPayload(tmp_path).offer(_broadcast(1, torch.tensor([0, 0, 0, 0])))
