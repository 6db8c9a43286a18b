"""What ranks on null devices tell each other: values that are known, and none that are made up."""

from __future__ import annotations

from pathlib import Path

import torch

from prismscale.devices.null import runtime, value_policy
from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.graph.node import CollectiveOp
from prismscale.payload.null_integers import ZeroIntegers, exact_value
from prismscale.payload.recorded import RecordedPayload


def broadcast(rank: int, tensor: torch.Tensor) -> Collective:
    """Of group rank 0, as ``rank`` sees it."""
    group = GroupHandle(group_index=0, ranks=(0, 1), group_rank=rank, name="", backend="nccl")
    op = CollectiveOp.BROADCAST
    return Collective(op=op, group=group, inputs=(tensor,), outputs=(tensor,), n_bytes=8, root=0)


def recorded(folder: Path, sent: torch.Tensor) -> torch.Tensor:
    """What group rank 1 receives of what rank 0 broadcast before; 7 where nothing."""
    received = torch.tensor(7, device="cuda")
    RecordedPayload(folder, value_of=exact_value).offer(broadcast(0, sent))
    RecordedPayload(folder, value_of=exact_value).offer(broadcast(1, received))
    return received


def test_a_known_value_reaches_the_receiver(tmp_path: Path) -> None:
    """Without a question to the device."""
    runtime.active().ledger.clear()
    assert recorded(tmp_path, torch.tensor(3, device="cuda")).item() == 3
    assert runtime.active().ledger.uses() == []


def test_an_unknown_value_is_not_sent(tmp_path: Path) -> None:
    """Nothing is made up for a peer that would take it for true."""
    sent = torch.empty((), dtype=torch.int64, device="cuda")
    assert recorded(tmp_path, sent).item() == 7
    # The receiver does not wait for it, because there is a file without values.
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"[]\n"]


def test_integers_of_an_absent_root_are_zero() -> None:
    """As new memory would hold; those that this rank knows stay."""
    unknown = torch.empty((), dtype=torch.int32, device="cuda")
    known = torch.tensor(5, device="cuda")
    assert not any(ZeroIntegers().offer(broadcast(1, tensor)) for tensor in (unknown, known))
    assert (unknown.item(), known.item()) == (0, 5)


def test_what_this_rank_broadcasts_itself_stays() -> None:
    """It is the root, and knows no better."""
    own = torch.empty((), dtype=torch.int32, device="cuda")
    ZeroIntegers().offer(broadcast(0, own))
    assert value_policy.known(own) is None
