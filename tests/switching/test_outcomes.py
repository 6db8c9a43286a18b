"""What collectives give, worked out from what is on disk: as torch's own arithmetic does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.errors import FormatError, MismatchError
from prismscale.graph.node import CollectiveOp
from prismscale.switching.outcomes import fill, reduced
from prismscale.switching.stored_values import RESULT, Given, StoredValues

SIZE = 3
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def member(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """What a member gives: small integers, different for each."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count).reshape(shape) * 5 + rank + 1) % 11).to(dtype)


def completed(
    op: CollectiveOp,
    inputs: Sequence[Sequence[Tensor]],
    outputs: Sequence[Tensor],
    *,
    mine: int = 1,
    root: int = -1,
    reduce_op: ReduceOp | None = None,
    splits: Sequence[Sequence[int]] = ((), (), ()),
    output_splits: Sequence[int] = (),
) -> Sequence[Tensor]:
    """The outputs of member ``mine``, where member ``m`` gave ``inputs[m]``."""
    group = GroupHandle(
        group_index=0, ranks=tuple(range(SIZE)), group_rank=mine, name="", backend="gloo"
    )
    given_ = [Given(tensors=tuple(t), splits=tuple(s)) for t, s in zip(inputs, splits, strict=True)]
    collective = Collective(
        op=op,
        group=group,
        inputs=tuple(inputs[mine]),
        outputs=tuple(outputs),
        n_bytes=0,
        root=root,
        reduce_op=reduce_op,
        output_splits=output_splits,
    )

    def result() -> Given:
        count = len(inputs[0])
        totals = reduced(SIZE, reduce_op, given_.__getitem__, count=count)
        return Given(tensors=tuple(totals))

    fill(collective, given_.__getitem__, result)
    return outputs


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_the_sum_of_all_members(dtype: torch.dtype) -> None:
    """In the members' own dtype."""
    inputs = [[member(m, (4,), dtype)] for m in range(SIZE)]
    (found,) = completed(CollectiveOp.ALL_REDUCE, inputs, [torch.empty(4, dtype=dtype)])
    assert torch.equal(found, torch.stack([i[0] for i in inputs]).sum(0).to(dtype))


def test_an_average_is_divided() -> None:
    """Once, at the end."""
    inputs = [[member(m, (4,))] for m in range(SIZE)]
    operation = ReduceOp.AVG
    (found,) = completed(CollectiveOp.ALL_REDUCE, inputs, [torch.empty(4)], reduce_op=operation)
    assert torch.equal(found, sum(i[0] for i in inputs) / SIZE)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.uint16], ids=str)
def test_an_average_of_integers_is_cut(dtype: torch.dtype) -> None:
    """To whole numbers: 1, 2 and 5 of three members make 2."""
    inputs = [[torch.tensor([v], dtype=dtype)] for v in (1, 2, 5)]
    output = torch.empty(1, dtype=dtype)
    (found,) = completed(CollectiveOp.ALL_REDUCE, inputs, [output], reduce_op=ReduceOp.AVG)
    assert found.item() == 2


def test_a_half_precision_sum_is_rounded_once() -> None:
    """256 + 1 + 1 is 258 in bfloat16, and 256 if each term is rounded."""
    inputs = [[torch.tensor([v], dtype=torch.bfloat16)] for v in (256.0, 1.0, 1.0)]
    (found,) = completed(CollectiveOp.ALL_REDUCE, inputs, [torch.empty(1, dtype=torch.bfloat16)])
    assert found.item() == 258.0


@pytest.mark.parametrize("is_flat", [True, False])
def test_reduce_scatter_gives_each_member_its_part(is_flat: bool) -> None:
    """Of one flat tensor, or of a list."""
    flat = [member(m, (SIZE * 2,)) for m in range(SIZE)]
    inputs = [[t] if is_flat else list(t.chunk(SIZE)) for t in flat]
    (found,) = completed(CollectiveOp.REDUCE_SCATTER, inputs, [torch.empty(2)], mine=2)
    assert torch.equal(found, sum(flat)[4:6])  # type: ignore[index]


@pytest.mark.parametrize("is_flat", [True, False])
def test_all_gather_gives_all_parts_in_order(is_flat: bool) -> None:
    """Into one tensor, or into a list."""
    inputs = [[member(m, (2,))] for m in range(SIZE)]
    outputs = [torch.empty(6)] if is_flat else [torch.empty(2) for _ in range(SIZE)]
    found = completed(CollectiveOp.ALL_GATHER, inputs, outputs)
    assert torch.equal(torch.cat(list(found)), torch.cat([i[0] for i in inputs]))


@pytest.mark.parametrize("op", [CollectiveOp.BROADCAST, CollectiveOp.RECV])
def test_what_one_member_sends_arrives(op: CollectiveOp) -> None:
    """From a root, or from a sender."""
    inputs = [[member(m, (3,))] for m in range(SIZE)]
    (found,) = completed(op, inputs, [torch.empty(3)], root=2)
    assert torch.equal(found, inputs[2][0])


def test_only_the_root_of_a_reduce_has_the_result() -> None:
    """The others keep what they gave."""
    inputs = [[member(m, (3,))] for m in range(SIZE)]
    (kept,) = completed(CollectiveOp.REDUCE, inputs, [inputs[1][0].clone()], mine=1, root=0)
    (found,) = completed(CollectiveOp.REDUCE, inputs, [torch.empty(3)], mine=0, root=0)
    assert torch.equal(kept, inputs[1][0])
    assert torch.equal(found, sum(i[0] for i in inputs))  # type: ignore[arg-type]


@given(st.lists(st.lists(st.integers(0, 3), min_size=SIZE, max_size=SIZE), min_size=3, max_size=3))
def test_uneven_rows_go_where_the_sender_meant_them(splits: list[list[int]]) -> None:
    """What the receiver expects from each is what each has for it."""
    inputs = [[member(m, (sum(splits[m]), 2))] for m in range(SIZE)]
    expected = [splits[m][1] for m in range(SIZE)]
    (found,) = completed(
        CollectiveOp.ALL_TO_ALL,
        inputs,
        [torch.empty(sum(expected), 2)],
        splits=splits,
        output_splits=expected,
    )
    rows = [torch.split(i[0], s)[1] for i, s in zip(inputs, splits, strict=True)]
    assert torch.equal(found, torch.cat(rows))


def test_rows_that_nobody_expects_are_refused() -> None:
    """A program whose ranks disagree about their splits."""
    inputs = [[member(m, (3, 2))] for m in range(SIZE)]
    with pytest.raises(MismatchError, match="2 elements arrive where the program expects 4"):
        completed(
            CollectiveOp.ALL_TO_ALL,
            inputs,
            [torch.empty(4, 2)],
            splits=[(1, 1, 1)] * 3,
            output_splits=(2, 1, 1),
        )


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=4
    )
)
def test_values_come_back_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[torch.dtype, list[int]]]
) -> None:
    """Any number of tensors of any shape, empty ones too."""
    values = StoredValues(tmp_path_factory.mktemp("values"))
    tensors = [member(1, shape, dtype) for dtype, shape in shapes]
    values.write("a.c.0", 7, tensors, (1, 2))
    found = values.read("a.c.0", 7)
    assert found.splits == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(found.tensors, tensors, strict=True))
    assert [t.dtype for t in found.tensors] == [dtype for dtype, _ in shapes]


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Wherever in the values it is."""
    values = StoredValues(tmp_path)
    values.write("a", RESULT, [torch.arange(100.0)], ())
    path = tmp_path / f"a.{RESULT}"
    content = bytearray(path.read_bytes())
    content[-50] ^= 4
    path.write_bytes(content)
    with pytest.raises(FormatError, match="its checksum is another"):
        values.read("a", RESULT)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"tensors": [["float32", [9]]]}\n'])
def test_damaged_values_are_refused(tmp_path: Path, content: bytes) -> None:
    """With the file's name."""
    (tmp_path / f"a.{RESULT}").write_bytes(content)
    with pytest.raises(FormatError, match=r"a\.result does not hold"):
        StoredValues(tmp_path).read("a", RESULT)
