"""Faults of a job: ranks that are slow, and ranks that hang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import UsageError

LAST_HANG = 10_000
"""Largest step in which a rank may hang: all steps before it are simulated."""
MOST_HANG_STEPS = 7
"""Number of different steps in which ranks may hang. One that waits for all of them ends after the
sum of as many infinite durations, which 64 bits hold seven of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """The slow and the hanging ranks of a job, by rank."""

    slow: Mapping[int, float] = field(default_factory=dict)
    """Factor on a rank's computation."""
    hang: Mapping[int, int] = field(default_factory=dict)
    """Steady step (counted from 0) at whose beginning a rank stops for ever."""

    def __post_init__(self) -> None:
        for rank, factor in self.slow.items():
            if not 0 < factor < 1e6:
                raise UsageError(f"--slow {rank}={factor}: the factor must lie between 0 and 1e6")
        for rank, step in self.hang.items():
            if not 0 <= step <= LAST_HANG:
                raise UsageError(f"--hang {rank}@step{step}: give a step from 0 to {LAST_HANG:,}")
        if len(set(self.hang.values())) > MOST_HANG_STEPS:
            raise UsageError(
                f"--hang: ranks hang in {len(set(self.hang.values()))} different steps; give "
                f"{MOST_HANG_STEPS} or fewer"
            )

    def factors(self, world_size: int) -> NDArray[np.float64]:
        """Return the factor on the computation of every rank."""
        factor_R = np.ones(world_size)
        factor_R[list(self.slow)] = list(self.slow.values())
        return factor_R

    def check(self, world_size: int) -> None:
        """Raise :class:`UsageError` if a named rank does not exist."""
        for rank in (*self.slow, *self.hang):
            if not 0 <= rank < world_size:
                raise UsageError(f"rank {rank} does not exist; ranks are 0 … {world_size - 1}")
