"""What every reader of a run's durations asks: :class:`DurationSource`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.job_graph import JobGraph

NEVER = 2**60
"""A time that does not come: what a hung rank's next node lasts. Sums of ordinary durations on top
of it stay far below the int64 limit."""

Duration = Any
"""Nanoseconds: an int, or an int64 array that broadcasts against ``[D, M]`` (computation, by draw
and member of the class) or ``[D, G]`` (communication, by draw and group of the family)."""


class DurationSource(Protocol):
    """Durations of template nodes. A communication's is read from one member only: the class at
    group rank 0 of a collective, the sender of a point-to-point."""

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """Durations of the prologue, by template node."""
        ...

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Durations of the body in ``step`` (0 is the first after the prologue), by body node."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LaterDurations:
    """Durations of a job that begins with the step ``first`` of another."""

    durations: DurationSource
    first: int

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """As they are: no step."""
        return self.durations.prologue(class_index)

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Durations of the body in ``first + step``."""
        return self.durations.body(class_index, self.first + step)


@dataclass(frozen=True, kw_only=True, slots=True)
class FactoredDurations:
    """Durations with a factor on the computation of each rank: slow ranks, unequal nodes."""

    graph: JobGraph
    durations: DurationSource
    factor_R: NDArray[np.float64]

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """As they are: who draws does not simulate it."""
        return self.durations.prologue(class_index)

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Durations of the body in ``step``."""
        rank_class = self.graph.classes[class_index]
        body = self.durations.body(class_index, step)
        return slowed(body, rank_class.trace.computes_B, self.factor_R[rank_class.members_M])


def slowed(
    durations: Sequence[Duration], computes_B: NDArray[np.bool_], factor_M: NDArray[np.float64]
) -> Sequence[Duration]:
    """The same durations, with a factor by member on those of computation."""
    if (factor_M == 1).all():
        return durations
    return [
        scaled(duration, factor_M) if computes else duration
        for duration, computes in zip(durations, computes_B.tolist(), strict=True)
    ]


def scaled(duration: Duration, factor: float | NDArray[np.float64]) -> NDArray[np.int64]:
    """A duration times a factor, in whole nanoseconds. Whoever slows ranks rounds here, so that
    all commands round alike."""
    return np.rint(duration * factor).astype(np.int64)
