"""Tensor shapes that Megatron's pipeline stages send each other if tensors differ between them.

With ``variable_seq_lengths``, or with a stage for the layers of multi-token prediction alone, a
stage sends three integers, a tensor's shape, before each tensor. For an absent stage the answer is
the shape that the schedule expects (its ``tensor_shape``). From the stage of multi-token prediction
on, the hidden states of its layers are appended, which multiplies the first dim.

The names are those of ``megatron/core/pipeline_parallel`` (0.14 to 0.20). Values that a captured
stage sent have priority (:mod:`prismscale.payload.recorded`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from prismscale.emulation.hook import Collective
from prismscale.graph.node import CollectiveOp

_DIMS = 3
_INTERLEAVED = "forward_backward_pipelining_with_interleaving"
_PREVIOUS, _NEXT = "recv_prev_shape_tensor", "recv_next_shape_tensor"


class MegatronShapes:
    """A payload rule for the shapes that an absent stage would send."""

    def __init__(self) -> None:
        self._received: Counter[str] = Counter()

    def offer(self, collective: Collective) -> bool:
        """Answer a receive of a shape; return False for any other communication."""
        if collective.op is not CollectiveOp.RECV or not _may_be_shape(collective.outputs):
            return False
        frames = _frames(sys._getframe())
        exchange = frames.get("_communicate_shapes")
        if exchange is None or exchange.f_back is None:
            return False
        (told,) = collective.outputs
        side = next((s for s in (_PREVIOUS, _NEXT) if exchange.f_locals.get(s) is told), "")
        expected = exchange.f_back.f_locals.get("tensor_shape")
        if not side or expected is None:
            return False
        self._received[side] += 1
        is_last = self._is_of_last_chunk(side, frames.get(_INTERLEAVED))
        layout = _layout(exchange.f_locals["self"].config)
        repeats = _repeats(layout, collective.group.group_rank, side) if is_last else 1
        first, *rest = expected
        told.copy_(torch.tensor([first * repeats, *rest]))
        return True

    def _is_of_last_chunk(self, side: str, schedule: FrameType | None) -> bool:
        """Return whether this receive on ``side`` is for the last of the rank's model chunks.

        Activations come in the schedule's order; gradients too, but from the last chunk to the
        first.
        """
        if schedule is None:
            return True
        table: Sequence[tuple[int, int]] = schedule.f_locals["schedule_table"]
        last = max(chunk for _, chunk in table)
        _, chunk = table[(self._received[side] - 1) % len(table)]
        return chunk == (last if side == _PREVIOUS else 0)


def _may_be_shape(outputs: Sequence[torch.Tensor]) -> bool:
    return len(outputs) == 1 and outputs[0].dtype is torch.int64 and outputs[0].numel() == _DIMS


def _frames(innermost: FrameType | None) -> dict[str, FrameType]:
    """Return the callers by function name; of one name, the innermost."""
    found: dict[str, FrameType] = {}
    while innermost is not None:
        found.setdefault(innermost.f_code.co_name, innermost)
        innermost = innermost.f_back
    return found


def _layout(config: Any) -> Sequence[Sequence[Any]]:
    """Return each pipeline rank's kinds of layers in its last chunk; empty without a layout."""
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    return () if layout is None else [chunks[-1] for chunks in layout.layout]


def _repeats(layout: Sequence[Sequence[Any]], rank: int, side: str) -> int:
    """Return how many hidden states a tensor of the last chunk of ``rank`` holds.

    The tensor enters that chunk, or its gradient comes back to it (``side``). To the last chunk of
    the last rank no gradient comes back.
    """
    if side == _NEXT and rank == len(layout) - 1:
        return 1
    before = layout[: rank if side == _PREVIOUS else rank + 1]
    return 1 + sum(kind.name == "mtp" for kinds in before for kind in kinds)
