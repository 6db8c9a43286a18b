"""Stalls: moments in which a node stops, so that everything on its devices is later.

Array axes: ``D`` draws, ``E`` stalls, ``M`` members of a class, ``B`` body nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Delays = dict[int, list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]]
"""For each body node, the draws, members and nanoseconds of the stalls that fall into it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStalls:
    """The stalls of one step in all draws."""

    draw_E: NDArray[np.int64]
    machine_E: NDArray[np.int64]
    """Cluster node that stalls."""
    when_E: NDArray[np.float64]
    """Share of the step's work that is done when the stall begins."""
    ns_E: NDArray[np.int64]

    @classmethod
    def drawn(
        cls,
        rng: np.random.Generator,
        *,
        expected: float,
        mean_s: float,
        draws: int,
        machines: int,
    ) -> StepStalls:
        """Draw the stalls of a step as a Poisson process.

        There are ``expected`` stalls per draw on average, each on one of the machines.
        """
        count = int(rng.poisson(expected * draws)) if expected else 0
        return cls(
            draw_E=rng.integers(0, draws, count),
            machine_E=rng.integers(0, machines, count),
            when_E=rng.random(count),
            ns_E=np.rint(rng.exponential(mean_s * 1e9, count)).astype(np.int64),
        )

    def and_also(self, others: StepStalls) -> StepStalls:
        """Return these stalls and the others together."""
        return StepStalls(
            draw_E=np.concatenate([self.draw_E, others.draw_E]),
            machine_E=np.concatenate([self.machine_E, others.machine_E]),
            when_E=np.concatenate([self.when_E, others.when_E]),
            ns_E=np.concatenate([self.ns_E, others.ns_E]),
        )

    def delays(
        self, machine_M: NDArray[np.int64], nodes: NDArray[np.int64], done_N: NDArray[np.float64]
    ) -> Delays:
        """Return the delays of the members of a class.

        Args:
            machine_M: cluster node of each member.
            nodes: body nodes that take a device's time, in order.
            done_N: share of the step's work that is done when each of these nodes ends.
        """
        found: Delays = {}
        if not len(self.draw_E) or not len(nodes):
            return found
        order_M = np.argsort(machine_M, kind="stable")
        first_E = np.searchsorted(machine_M[order_M], self.machine_E)
        stop_E = np.searchsorted(machine_M[order_M], self.machine_E, side="right")
        node_E = nodes[np.minimum(np.searchsorted(done_N, self.when_E), len(nodes) - 1)]
        for e in np.flatnonzero(stop_E > first_E).tolist():
            members = order_M[first_E[e] : stop_E[e]]
            rows = np.full(len(members), self.draw_E[e])
            delay = np.full(len(members), self.ns_E[e])
            found.setdefault(int(node_E[e]), []).append((rows, members, delay))
        return found
