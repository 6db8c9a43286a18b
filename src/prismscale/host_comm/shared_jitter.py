"""The jitter that ranks of a slice have in common, because they run on one machine.

See [Note: common jitter] in :mod:`prismscale.live.coordinator.rank_jitter`, which uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHORTEST_NS = 100_000.0
"""Shorter spans are left out: a clock reading or a cache miss decides how long they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """One rank's computation, span by span.

    Each span has its begin and end on the monotonic clock, its usual duration (the median over
    steps), and its slowness.
    """

    began_ns_K: NDArray[np.float64]
    ended_ns_K: NDArray[np.float64]
    usual_ns_K: NDArray[np.float64]
    slowness_K: NDArray[np.float64]
    """Logarithm of duration over usual duration."""

    @staticmethod
    def of_steps(
        began_ns_SB: NDArray[np.int64], ended_ns_SB: NDArray[np.int64], own_ns_SB: NDArray[np.int64]
    ) -> Spans:
        """Make the spans of ``S`` steps of ``B`` spans each.

        ``own_ns_SB`` is the duration of each span without the waiting in it.
        """
        usual_SB = np.broadcast_to(np.median(own_ns_SB, axis=0), own_ns_SB.shape)
        # A span that was nothing but waiting has no logarithm.
        kept = (usual_SB >= SHORTEST_NS) & (own_ns_SB > 0)
        return Spans(
            began_ns_K=began_ns_SB[kept].astype(np.float64),
            ended_ns_K=ended_ns_SB[kept].astype(np.float64),
            usual_ns_K=usual_SB[kept],
            slowness_K=np.log(own_ns_SB[kept] / usual_SB[kept]),
        )

    def table(self) -> NDArray[np.float64]:
        """All four arrays as one table, for a file."""
        return np.stack([self.began_ns_K, self.ended_ns_K, self.usual_ns_K, self.slowness_K])

    @staticmethod
    def from_table(table: NDArray[np.float64]) -> Spans:
        """Read what :meth:`table` returned."""
        began, ended, usual, slowness = table
        return Spans(began_ns_K=began, ended_ns_K=ended, usual_ns_K=usual, slowness_K=slowness)

    def slowness_during(
        self, began_ns: NDArray[np.float64], ended_ns: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Mean slowness in each of some intervals. It is 0 while this rank does not compute."""
        # ``np.interp`` wants times in order, but the kept spans are ordered by step and node.
        order = np.argsort(self.began_ns_K)
        began, ended = self.began_ns_K[order], self.ended_ns_K[order]
        # Slowness summed over time up to each moment: it rises within spans and is level between
        # them.
        moments = np.stack([began, ended], axis=1).reshape(-1)
        added = np.stack([np.zeros_like(began), self.slowness_K[order] * (ended - began)], axis=1)
        until = np.cumsum(added.reshape(-1))
        area = np.interp(ended_ns, moments, until) - np.interp(began_ns, moments, until)
        return area / np.maximum(ended_ns - began_ns, 1.0)


def shared_jitter(own: Spans, others: Sequence[Spans]) -> float:
    """Correlation of a rank's slowness with that of other ranks at the same time.

    Long spans count for more. 0 where there is no correlation.
    """
    found = [_correlation(own, other) for other in others]
    return max(0.0, float(np.mean(found))) if found else 0.0


def _correlation(own: Spans, other: Spans) -> float:
    if not len(own.slowness_K) or not len(other.slowness_K):
        return 0.0
    theirs_K = other.slowness_during(own.began_ns_K, own.ended_ns_K)
    weight_K = own.usual_ns_K
    own_K = own.slowness_K - np.average(own.slowness_K, weights=weight_K)
    theirs_K = theirs_K - np.average(theirs_K, weights=weight_K)
    together = float((weight_K * own_K * theirs_K).sum())
    alone = float((weight_K * own_K**2).sum() * (weight_K * theirs_K**2).sum())
    # Rounding puts two ranks with equal slowness a little over 1.
    return min(1.0, together / alone**0.5) if alone > 0 else 0.0
