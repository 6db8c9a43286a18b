"""What a rule says on a device that has few values."""

from __future__ import annotations

import torch
from torch.distributed import ReduceOp

from prismscale.devices.null.value_policy import known
from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.graph.node import CollectiveOp
from prismscale.payload.null_integers import exact_value
from prismscale.payload.rules.rule import Communication, Match, Rule
from prismscale.payload.rules.rule_book import RuleBook

GROUP = GroupHandle(group_index=0, ranks=(0, 1, 2, 3), group_rank=1, name="", backend="nccl")


def offered(op: CollectiveOp, tensor: torch.Tensor, root: int = -1) -> bool:
    """Whether the rule has to leave the answer to others, because this rank's part is unknown."""
    left = []

    def said(told: Communication, peer: int) -> int:
        return 10 + peer

    rule = Rule(name="said", where="here", match=Match(), contribute=said)
    book = RuleBook([rule], value_of=exact_value)
    collective = Collective(
        op=op,
        group=GROUP,
        inputs=(tensor,),
        outputs=(tensor,),
        n_bytes=0,
        root=root,
        reduce_op=ReduceOp(ReduceOp.MAX),
    )
    assert book.offer(collective, lambda: left.append(collective))
    return bool(left)


def test_what_a_rule_sends_is_known() -> None:
    """A flag, and whatever else a program reads."""
    flags = torch.zeros(3, dtype=torch.int64, device="cuda")
    assert not offered(CollectiveOp.BROADCAST, flags, root=2)
    assert flags.tolist() == [12, 12, 12]


def test_what_follows_from_known_values_is_known() -> None:
    """The largest of this rank's and of what its peers have."""
    flag = torch.tensor([11.0], device="cuda")
    assert not offered(CollectiveOp.ALL_REDUCE, flag)
    assert flag.item() == 13.0


def test_what_follows_from_unknown_values_is_unknown() -> None:
    """The rule counts, and the device's own answer stands."""
    loss = torch.randn(4, device="cuda")
    assert offered(CollectiveOp.ALL_REDUCE, loss)
    assert known(loss) is None
