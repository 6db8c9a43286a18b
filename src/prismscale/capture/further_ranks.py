"""Orders the ranks that were not captured, most different first, for a budget of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray


def most_different(
    positions: Sequence[NDArray[np.int64]], seen: Iterable[int], world_size: int
) -> Iterator[int]:
    """Iterate over every rank that was not seen, most different first.

    The next rank is the one whose positions on the axes of the mesh were seen least often; among
    equals the lowest.

    Args:
        positions: for each axis, the position of every rank.
        seen: ranks that were captured.
        world_size: number of ranks in the job.
    """
    left = np.ones(world_size, dtype=bool)
    looked = [np.zeros(int(p.max(initial=0)) + 1) for p in positions]

    def look(rank: int) -> None:
        left[rank] = False
        for counts, position_R in zip(looked, positions, strict=True):
            counts[position_R[rank]] += 1

    for rank in seen:
        look(rank)
    while left.any():
        familiar = np.zeros(world_size)
        for counts, position_R in zip(looked, positions, strict=True):
            familiar += counts[position_R]
        familiar[~left] = np.inf
        rank = int(familiar.argmin())
        yield rank
        look(rank)
