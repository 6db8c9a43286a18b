"""The vote of ``torch.distributed.pipelining`` on how stages learn each other's shapes.

Before its first step a pipeline multiplies one flag along its stages (1: this stage was given
static shapes) and sends the product back. A stage without peers assumes that the others voted as
it did. A pipeline with static shapes then needs no peer; one without exchanges pickled metadata,
which :mod:`prismscale.payload.objects` refuses unless the sending stage is captured too.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

from prismscale.emulation.call_site import callers
from prismscale.emulation.hook import Collective
from prismscale.graph.node import CollectiveOp


class PipelineVote:
    """A payload rule for the two receives of the vote."""

    def __init__(self) -> None:
        self._sent = 0

    def offer(self, collective: Collective) -> bool:
        """Answer a receive of the vote; return False for any other communication."""
        if not collective.op.is_p2p:
            return False
        tensors = collective.outputs or collective.inputs
        if len(tensors) != 1 or tensors[0].dtype is not torch.int32 or tensors[0].numel() != 1:
            return False
        phase = _phase(sys._getframe())
        if phase is None:
            return False
        if collective.op is CollectiveOp.SEND:
            self._sent = int(tensors[0])
            return False
        tensors[0].fill_(1 if phase == "_warmup_forward_vote" else self._sent)
        return True


def _phase(frame: FrameType | None) -> str | None:
    for caller in callers(frame):
        name = caller.f_code.co_name
        if name in ("_warmup_forward_vote", "_warmup_backward_result"):
            return name
    return None
