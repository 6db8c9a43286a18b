"""What an absent stage of a Megatron pipeline says about the shape of what it sends."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.graph.node import CollectiveOp
from prismscale.payload.mirror import MirrorPayload

SHAPE = (4096, 1, 7168)
STAGES, CHUNKS = 4, 2
Kind = Enum("Kind", ["embedding", "decoder", "mtp", "loss"])
# Of each rank's chunks: the layers of multi-token prediction are alone on the third rank.
LAYOUT = [[[Kind.decoder], [kind]] for kind in (Kind.decoder, Kind.decoder, Kind.mtp, Kind.loss)]
TABLE = [(m, c) for g in (0, 4) for c in range(CHUNKS) for m in range(g, g + 4)]


class Communicator:
    """As Megatron's, whose functions and variables are found by name."""

    def __init__(self, rank: int, layout: Any) -> None:
        inner = None if layout is None else SimpleNamespace(layout=layout)
        self.config = SimpleNamespace(pipeline_model_parallel_layout=inner)
        self.rank = rank
        self.payload = MirrorPayload()

    def _communicate_shapes(self, *, from_previous: bool) -> list[int]:
        recv_prev_shape_tensor = recv_next_shape_tensor = None
        shape = torch.empty(3, dtype=torch.int64)
        if from_previous:
            recv_prev_shape_tensor = shape
        else:
            recv_next_shape_tensor = shape
        group = GroupHandle(
            group_index=0, ranks=tuple(range(STAGES)), group_rank=self.rank, name="", backend="nccl"
        )
        peer = self.rank + (-1 if from_previous else 1)
        outputs = (recv_prev_shape_tensor if from_previous else recv_next_shape_tensor,)
        self.payload.fill(
            Collective(
                op=CollectiveOp.RECV, group=group, inputs=(), outputs=outputs, n_bytes=0, root=peer
            )
        )
        return shape.tolist()

    def _communicate(self, *, tensor_shape: Any, from_previous: bool) -> list[int]:
        return self._communicate_shapes(from_previous=from_previous)

    def forward_backward_pipelining_with_interleaving(self, *, from_previous: bool) -> list[int]:
        """First dims of what is received in a step, one after another."""
        schedule_table = TABLE
        received = (
            self._communicate(tensor_shape=SHAPE, from_previous=from_previous)
            for _ in range(len(schedule_table))
        )
        return [shape[0] // SHAPE[0] for shape in received if shape[1:] == [*SHAPE[1:]]]


@pytest.mark.parametrize("layout", [None, LAYOUT])
def test_it_is_the_shape_that_the_schedule_expects(layout: Any) -> None:
    """Also without a layout (sequences of varying lengths), and without interleaving."""
    stage = Communicator(1, layout)

    assert stage._communicate(tensor_shape=SHAPE, from_previous=True) == [*SHAPE]
    assert stage._communicate(tensor_shape=SHAPE, from_previous=False) == [*SHAPE]


@pytest.mark.parametrize(
    ("rank", "from_previous", "by_chunk"),
    [
        (1, True, {0: 1, 1: 1}),
        (2, True, {0: 1, 1: 1}),
        (2, False, {0: 1, 1: 2}),
        (3, True, {0: 1, 1: 2}),
    ],
)
def test_what_leaves_the_stage_of_further_tokens_is_longer(
    rank: int, from_previous: bool, by_chunk: dict[int, int]
) -> None:
    """And so is its gradient; in each step the chunks come in the schedule's order, for gradients
    from the last."""
    stage = Communicator(rank, LAYOUT)
    chunks = [chunk if from_previous else CHUNKS - 1 - chunk for _, chunk in TABLE]
    expected = [by_chunk[chunk] for chunk in chunks]

    for _ in range(2):
        lengths = stage.forward_backward_pipelining_with_interleaving(from_previous=from_previous)
        assert lengths == expected


def test_other_receives_of_three_integers_stay_zero() -> None:
    """They say nothing about a shape."""
    told = torch.ones(3, dtype=torch.int64)
    group = GroupHandle(group_index=0, ranks=(0, 1), group_rank=1, name="", backend="nccl")
    MirrorPayload().fill(
        Collective(op=CollectiveOp.RECV, group=group, inputs=(), outputs=(told,), n_bytes=0, root=0)
    )
    assert told.tolist() == [0, 0, 0]
