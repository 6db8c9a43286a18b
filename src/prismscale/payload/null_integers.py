"""Values in messages between ranks, on a device that has few."""

from __future__ import annotations

import torch

from prismscale.devices.null.value_policy import known
from prismscale.emulation.hook import Collective
from prismscale.graph.node import CollectiveOp


def exact_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a message with ``tensor`` says; None where nobody knows. The program does not wait."""
    return tensor.detach() if tensor.device.type == "cpu" else known(tensor)


class ZeroIntegers:
    """A payload rule: integers that an absent root broadcasts are 0 where this rank knows none.

    They are sizes, votes and flags more often than not, and 0 is what new memory holds.
    """

    def offer(self, collective: Collective) -> bool:
        """Leave the rest of the answer, and every other communication, to later rules."""
        is_absent = collective.root != collective.group.group_rank
        if collective.op is CollectiveOp.BROADCAST and is_absent:
            for tensor in collective.outputs:
                if not _has_fractions(tensor) and exact_value(tensor) is None:
                    tensor.zero_()
        return False


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
