"""Values in messages between ranks on the null device, where few tensors have known values."""

from __future__ import annotations

import torch

from prismscale.devices.null.value_policy import known
from prismscale.emulation.hook import Collective
from prismscale.graph.node import CollectiveOp


def exact_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of ``tensor``, or None if they are unknown. The program does not wait."""
    return tensor.detach() if tensor.device.type == "cpu" else known(tensor)


class ZeroIntegers:
    """A payload rule: integers from an absent broadcast root are 0 if this rank knows no value.

    They are mostly sizes, votes and flags, and 0 is what new memory holds.
    """

    def offer(self, collective: Collective) -> bool:
        """Set unknown integers to 0. The answer is always False: later rules do the rest."""
        is_absent = collective.root != collective.group.group_rank
        if collective.op is CollectiveOp.BROADCAST and is_absent:
            for tensor in collective.outputs:
                if not _has_fractions(tensor) and exact_value(tensor) is None:
                    tensor.zero_()
        return False


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
