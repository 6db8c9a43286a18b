"""Which ranks to look at, so that each pipeline stage is seen once: rank 0's column."""

from __future__ import annotations

from prismscale.capture.plan import axes_of_messages, find_axes, rank_at
from prismscale.graph.trace import RankTrace

MOST_STAGES = 64
"""Positions along an axis beyond which only the first, the second, a middle and the last are
looked at."""


def stage_ranks(trace: RankTrace) -> dict[int, str]:
    """The rank of each stage, with the stage's name, from what rank 0 did: those along the axes in
    which it sends or receives."""
    axes = find_axes(trace)
    found = {0: "all ranks"}
    for number in axes_of_messages(trace, axes):
        axis = axes[number]
        found[0] = "stage 0"
        for position in _positions(axis.size):
            place = tuple(position if a == number else 0 for a in range(len(axes)))
            found.setdefault(rank_at(axes, place), f"stage {position}")
    return found


def _positions(size: int) -> list[int]:
    return list(range(size)) if size <= MOST_STAGES else sorted({0, 1, size // 2, size - 1})
