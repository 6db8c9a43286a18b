"""The engine's running state: the progress of each class, and the communications in progress.

Times are int64 nanoseconds, shaped ``[M]`` or ``[D, M]`` (``M`` members, ``D`` draws). An axis of
length 1 stands for "the same for all" and is expanded only when it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.source import Duration
from prismscale.sim.program import ClassProgram

Times = NDArray[np.int64]


def earliest(times: Times) -> int:
    """Return the earliest of some times.

    The class of a live rank has one member, and a NumPy reduction of one value takes as long as all
    other work on it.
    """
    return int(times.item() if times.size == 1 else times.min())


def latest(times: Times) -> int:
    """Return the latest of some times; see :func:`earliest`."""
    return int(times.item() if times.size == 1 else times.max())


@dataclass(slots=True)
class CollectiveInstance:
    """One communication in progress: the sides that have arrived, and the last arrival so far."""

    channel: int
    missing: int
    arrival_G: Times | None = None
    duration: Duration = 0
    present: list[tuple[int, int]] = field(default_factory=list)
    """(class, stream position) of every side that has arrived."""
    arrivals: list[tuple[int, Times]] = field(default_factory=list)
    """(class, arrivals of its members ``[..., M]``); kept only if hangs or nodes are watched."""

    def copied(self) -> CollectiveInstance:
        """Return an independent copy."""
        return replace(self, present=list(self.present), arrivals=list(self.arrivals))


@dataclass(slots=True)
class ClassState:
    """The progress of one class."""

    program: ClassProgram
    position: int
    stop: int
    ends: dict[int, Times] = field(default_factory=dict)
    durations: Sequence[Duration] = ()
    durations_base: int = 0
    """Stream position of ``durations[0]``."""
    uses: dict[int, int] = field(default_factory=dict)
    """How often the class has used each channel."""
    blocked_on: int = -1
    external: bool = False
    """True for a live rank, which reports its arrivals; they are not computed."""
