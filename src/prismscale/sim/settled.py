"""Finds extra times that follow from the timeline that they change: simulates until they settle."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.graph_durations import GraphDurations

MOST_ROUNDS = 8
"""Most simulations. Overlaps that appear and vanish with each other's times would never settle."""
SETTLED_SHARE = 1e-4
"""Share of the step. Times have settled if none changes by more than this."""

Extra = Mapping[int, NDArray[np.int64]]
"""Extra nanoseconds of nodes, compared with alone: by class, by body node (``[B]``)."""


def settled(
    alone: GraphDurations,
    with_extra: Callable[[Extra], GraphDurations],
    extra_in: Callable[[GraphDurations], tuple[Extra, int]],
) -> GraphDurations:
    """Return durations with extra times that follow from their own timeline.

    Args:
        alone: durations without extra times.
        with_extra: gives ``alone`` with extra times.
        extra_in: simulates durations; gives the extra times that follow, and the step in ns.
    """
    known: Extra = {}
    found = alone
    for n in range(MOST_ROUNDS):
        new, step_ns = extra_in(found)
        off = max((int(np.abs(new[c] - known[c]).max(initial=0)) for c in known), default=None)
        # From the third round on, the mean of old and new, so that overlaps do not alternate.
        known = new if n < 2 else {c: (new[c] + known[c] + 1) // 2 for c in new}
        found = with_extra(known)
        if off is not None and off <= SETTLED_SHARE * step_ns:
            break
    return found
