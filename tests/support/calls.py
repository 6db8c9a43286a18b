"""Communications as hooks see them."""

from __future__ import annotations

import torch

from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.graph.node import CollectiveOp

RANKS = (2, 5, 7, 9)


def call(
    rank: int,
    *tensors: torch.Tensor,
    op: CollectiveOp = CollectiveOp.ALL_REDUCE,
    root: int = -1,
    group_index: int = 0,
) -> Collective:
    """A communication of four ranks, seen by one of them."""
    group = GroupHandle(
        group_index=group_index, ranks=RANKS, group_rank=RANKS.index(rank), name="", backend="gloo"
    )
    outputs = () if op == CollectiveOp.SEND else tensors
    inputs = () if op == CollectiveOp.RECV else tensors
    return Collective(op=op, group=group, inputs=inputs, outputs=outputs, n_bytes=0, root=root)
