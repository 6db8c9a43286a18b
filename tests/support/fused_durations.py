"""Known durations of a fused graph, from those of its origin: to check that both agree exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.source import Duration, DurationSource
from prismscale.errors import UsageError
from prismscale.forecast.draws.lockstep import FusedClass, FusedGraph
from prismscale.graph.node import NodeKind


@dataclass(frozen=True, kw_only=True)
class FusedDurations:
    """Durations of the fused graph, computed from those of its origin (a ``DurationSource``)."""

    fused: FusedGraph
    origin: DurationSource

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """The fused graph has none."""
        return ()

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Chains as the module says; the rest as it is, of the first group through each set."""
        durations = self.origin.body(class_index, step)
        own = self.fused.classes[class_index]
        return [self._chain(class_index, chain, durations, own) for chain in own.chains]

    def _chain(
        self,
        class_index: int,
        chain: tuple[int, ...],
        durations: Sequence[Duration],
        own: FusedClass,
    ) -> Duration:
        rank_class = self.fused.origin.classes[class_index]
        trace = rank_class.trace
        kinds = trace.kind_N[trace.n_prologue :]
        if len(chain) == 1 and kinds[chain[0]] != NodeKind.COMPUTE:
            return _first_of_set(np.asarray(durations[chain[0]]))
        total: Duration = 0
        segment: Duration = 0
        for node in chain:
            if kinds[node] == NodeKind.COMPUTE:
                segment = segment + _by_member(durations[node], rank_class.size)
                continue
            sets = rank_class.slots[self.fused.set_group_index].group_M[own.members_KF[0]]
            communication = np.asarray(durations[node])
            communication = (
                communication
                if communication.ndim == 0 or communication.shape[-1] == 1
                else communication[..., sets]
            )
            total = total + _slowest(segment, own) + communication
            segment = 0
        return total + _slowest(segment, own)


def _by_member(duration: Duration, members: int) -> NDArray[np.int64]:
    array = np.atleast_1d(np.asarray(duration, dtype=np.int64))
    return np.broadcast_to(array, (*array.shape[:-1], members))


def _slowest(segment: Duration, own: FusedClass) -> Duration:
    """``[..., M]`` → ``[..., F]``: the slowest member of every set."""
    if isinstance(segment, int):
        return segment
    return segment[..., own.members_KF].max(axis=-2)


def _first_of_set(duration: NDArray[np.int64]) -> Duration:
    if duration.ndim == 0 or duration.shape[-1] == 1:
        return duration
    raise UsageError(
        "communication that differs between the groups of a family cannot be fused; use --no-fuse"
    )
