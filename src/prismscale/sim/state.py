"""What the engine knows of a job on its way: how far each class has come, and who waits for whom.

Times are int64 nanoseconds, shaped ``[M]`` or ``[D, M]`` (``M`` members, ``D`` draws); an axis of
length 1 stands for "the same for all" and is never expanded before it must be.
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
    """The earliest of some times. A live rank's class has one member, and NumPy's reduction of one
    value takes as long as all else that is done with it."""
    return int(times.item() if times.size == 1 else times.min())


def latest(times: Times) -> int:
    """The latest of some times; see :func:`earliest`."""
    return int(times.item() if times.size == 1 else times.max())


@dataclass(slots=True)
class CollectiveInstance:
    """One communication in progress: who has come, and when the last one did."""

    channel: int
    missing: int
    arrival_G: Times | None = None
    duration: Duration = 0
    present: list[tuple[int, int]] = field(default_factory=list)
    """(class, stream position) of every side that has come."""
    arrivals: list[tuple[int, Times]] = field(default_factory=list)
    """By class, the arrivals of its members ``[..., M]``; kept only where hangs or nodes are
    watched."""

    def copied(self) -> CollectiveInstance:
        """The same state, apart from this one."""
        return replace(self, present=list(self.present), arrivals=list(self.arrivals))


@dataclass(slots=True)
class ClassState:
    """Progress of one class."""

    program: ClassProgram
    position: int
    stop: int
    ends: dict[int, Times] = field(default_factory=dict)
    durations: Sequence[Duration] = ()
    durations_base: int = 0
    """Stream position of ``durations[0]``."""
    uses: dict[int, int] = field(default_factory=dict)
    """How often each channel was used."""
    blocked_on: int = -1
    external: bool = False
    """A live rank: its arrivals are told, not computed."""
