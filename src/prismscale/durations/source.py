"""Durations of a job graph's nodes: the protocol :class:`DurationSource` and wrappers around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.job_graph import JobGraph

NEVER = 2**60
"""Duration of a hung rank's next node, which never ends. Sums of ordinary durations on top of it
stay far below the int64 limit."""

Duration = Any
"""A duration in nanoseconds: an int, or an int64 array that broadcasts against ``[D, M]``
(computation, by draw and member of the class) or ``[D, G]`` (communication, by draw and group of
the family)."""


class DurationSource(Protocol):
    """Gives the durations of template nodes, the nodes that a class stores.

    The duration of a communication is read from one member only: from the class at group rank 0
    for a collective, from the sender for a point-to-point operation.
    """

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """Return the durations of the prologue, by template node."""
        ...

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Return the durations of the body in ``step`` (0 follows the prologue), by body node."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LaterDurations:
    """Durations of a job that begins with step ``first`` of other :attr:`durations`."""

    durations: DurationSource
    first: int

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """Return the prologue unchanged, because it belongs to no step."""
        return self.durations.prologue(class_index)

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Return the durations of the body in step ``first + step`` of :attr:`durations`."""
        return self.durations.body(class_index, self.first + step)


@dataclass(frozen=True, kw_only=True, slots=True)
class FactoredDurations:
    """Durations with a factor on each rank's computation, for slow ranks and unequal nodes."""

    graph: JobGraph
    durations: DurationSource
    factor_R: NDArray[np.float64]

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """Return the prologue unchanged: Monte Carlo draws do not simulate it."""
        return self.durations.prologue(class_index)

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Return the durations of the body in ``step``, with each rank's factor applied."""
        rank_class = self.graph.classes[class_index]
        body = self.durations.body(class_index, step)
        return slowed(body, rank_class.trace.computes_B, self.factor_R[rank_class.members_M])


def slowed(
    durations: Sequence[Duration], computes_B: NDArray[np.bool_], factor_M: NDArray[np.float64]
) -> Sequence[Duration]:
    """Multiply the durations of computation by a factor per member; communication is unchanged."""
    if (factor_M == 1).all():
        return durations
    return [
        scaled(duration, factor_M) if computes else duration
        for duration, computes in zip(durations, computes_B.tolist(), strict=True)
    ]


def scaled(duration: Duration, factor: float | NDArray[np.float64]) -> NDArray[np.int64]:
    """Multiply a duration by a factor and round to whole nanoseconds.

    All code that slows ranks rounds here, so that all commands round alike.
    """
    return np.rint(duration * factor).astype(np.int64)
