"""Values that are not kept for receivers: nobody waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.graph.node import CollectiveOp
from prismscale.payload.recorded import RecordedPayload

LARGE = torch.zeros(1 << 16, dtype=torch.int64)
UNKEPT = {
    CollectiveOp.BROADCAST: ([LARGE] * 3, [LARGE] * 3),
    CollectiveOp.SCATTER: ([LARGE] * 4, [LARGE]),
}


def call(
    op: CollectiveOp,
    rank: int,
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    ranks: tuple[int, ...] = (0, 1, 2, 3),
) -> Collective:
    """What group rank 0 sends, as group rank ``rank`` sees it."""
    group = GroupHandle(group_index=0, ranks=ranks, group_rank=rank, name="", backend="gloo")
    given, made = tuple(inputs), tuple(outputs)
    return Collective(op=op, group=group, inputs=given, outputs=made, n_bytes=0, root=0)


def receiver(folder: Path) -> RecordedPayload:
    """A rank that must not wait, although its sender is being captured."""

    def is_captured_now(rank: int) -> bool:
        raise AssertionError("the receiver waits")

    return RecordedPayload(folder, is_captured_now=is_captured_now)


@pytest.mark.parametrize("op", UNKEPT, ids=lambda op: op.spelling)
def test_nobody_waits_for_a_value_too_large_to_be_kept(tmp_path: Path, op: CollectiveOp) -> None:
    """The receiver sees the same size as the sender."""
    inputs, outputs = UNKEPT[op]
    RecordedPayload(tmp_path).offer(call(op, 0, inputs, outputs))
    assert not receiver(tmp_path).offer(call(op, 1, [], outputs))
    assert not list(tmp_path.iterdir())


def test_nobody_waits_for_a_value_that_its_sender_does_not_know(tmp_path: Path) -> None:
    """As on the null device. What the sender of another group knows is still taken."""

    def broadcast(rank: int, value: torch.Tensor, ranks: tuple[int, ...]) -> Collective:
        return call(CollectiveOp.BROADCAST, rank, [value], [value], ranks)

    sender = RecordedPayload(tmp_path, value_of=lambda tensor: None)
    sender.offer(broadcast(0, torch.tensor([5]), (6, 7)))
    received = torch.tensor([0])
    assert not receiver(tmp_path).offer(broadcast(1, received, (6, 7)))
    RecordedPayload(tmp_path).offer(broadcast(0, torch.tensor([8]), (0, 1)))
    assert receiver(tmp_path).offer(broadcast(1, received, (6, 7)))
    assert received.item() == 8
