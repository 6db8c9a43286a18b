"""Which communications are complete, and whom they still need."""

from __future__ import annotations

import pytest

from prismscale.errors import MismatchError
from prismscale.graph.node import CollectiveOp
from prismscale.switching.operations import IssuedPart, OperationTable


def part(rank: int, op: CollectiveOp = CollectiveOp.ALL_GATHER, **more: object) -> IssuedPart:
    """A part of one communication among ranks 0 to 2."""
    fields: dict[str, object] = {"name": "a", "members": (0, 1, 2), "n_bytes": 8, **more}
    return IssuedPart(rank=rank, op=op, **fields)  # type: ignore[arg-type]


def test_a_collective_needs_all_its_members() -> None:
    """Who comes last completes it for all."""
    table = OperationTable(3)
    table.issue(part(0))
    table.issue(part(2))
    assert table.missing("a", 0) == (1,)
    table.issue(part(1))
    assert table.missing("a", 0) == table.missing("a", 1) == ()


def test_the_last_rank_works_out_what_is_reduced() -> None:
    """Until it has, the others wait for it."""
    table = OperationTable(3)
    reduces = [table.issue(part(rank, CollectiveOp.ALL_REDUCE)) for rank in (2, 0, 1)]
    assert reduces == [False, False, True]
    assert table.missing("a", 2) == (1,)
    table.reduced("a")
    assert table.missing("a", 2) == ()


@pytest.mark.parametrize("op", [CollectiveOp.BROADCAST, CollectiveOp.SCATTER])
def test_what_comes_from_a_root_needs_the_root_only(op: CollectiveOp) -> None:
    """The root itself waits for nobody."""
    table = OperationTable(3)
    table.issue(part(0, op, root=1))
    assert table.missing("a", 0) == (1,)
    table.issue(part(1, op, root=1))
    assert table.missing("a", 0) == table.missing("a", 1) == ()


def test_what_goes_to_a_root_keeps_the_root_only() -> None:
    """The others go on at once."""
    table = OperationTable(3)
    table.issue(part(0, CollectiveOp.GATHER, root=1))
    table.issue(part(1, CollectiveOp.GATHER, root=1))
    assert table.missing("a", 0) == ()
    assert table.missing("a", 1) == (2,)


def test_a_message_waits_for_its_sender() -> None:
    """The sender's own part is done when it is issued."""
    table = OperationTable(3)
    table.issue(part(2, CollectiveOp.RECV, members=(0, 2)))
    assert table.missing("a", 2) == (0,)
    table.issue(part(0, CollectiveOp.SEND, members=(0, 2)))
    assert table.missing("a", 2) == table.missing("a", 0) == ()


def test_ranks_that_others_wait_for_are_counted() -> None:
    """By how many communications lack their part."""
    table = OperationTable(3)
    table.issue(part(0))
    table.issue(part(0, name="b"))
    table.issue(part(1))
    assert [table.pending(rank) for rank in range(3)] == [0, 1, 2]


def test_values_are_free_when_all_have_them() -> None:
    """Not before."""
    table = OperationTable(3)
    for rank in range(3):
        table.issue(part(rank))
    assert [table.take("a", rank) for rank in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    "other",
    [
        {"op": CollectiveOp.ALL_REDUCE},
        {"n_bytes": 16},
        {"op": CollectiveOp.ALL_GATHER, "reduction": "RedOpType.MAX"},
    ],
)
def test_members_that_disagree_are_named(other: dict[str, object]) -> None:
    """With both lines of the program."""
    table = OperationTable(3)
    table.issue(part(0, site="train.py:7"))
    with pytest.raises(MismatchError, match=r"rank 0 has .*train.py:7 where rank 1 has .*:9"):
        table.issue(part(1, **{"site": "train.py:9", **other}))  # type: ignore[arg-type]


def test_splits_may_differ() -> None:
    """An all-to-all carries what each member has for each."""
    table = OperationTable(3)
    table.issue(part(0, CollectiveOp.ALL_TO_ALL, n_bytes=8))
    table.issue(part(1, CollectiveOp.ALL_TO_ALL, n_bytes=80))
    assert table.missing("a", 0) == (2,)
