"""Selects the communications for which a live rank does its share of the work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prismscale.graph.node import NodeKind
from prismscale.graph.trace import RankTrace
from prismscale.host_comm.transport import COMPUTES_NS
from prismscale.live.coordinator.wire import UNCOVERED_ID_BASE


class Overlap:
    """How long a program computes beside each communication of its trace.

    [Note: work nobody would notice] A pair of gloo contexts does the work of a communication on the
    live rank's core, so that it slows down what the program computes meanwhile. If the program
    waits at once, there is nothing to slow down: the wait is as long as the communication took when
    it was really made. But two contexts on one core interrupt each other for milliseconds after a
    wake-up, which a rank's single context does not do. Whatever is left of that when the program
    goes on would be counted as the program's own time. So for such communications a live rank only
    spends the time that issuing takes. If a trace's communications were not really made, it was
    itself captured beside the pair, at every communication, and its live ranks do the same.
    """

    def __init__(self, trace: RankTrace) -> None:
        co_run = trace.facts.co_run
        self.issue_ns = co_run.issue_ns if co_run else 0
        """Time that issuing a communication takes."""
        self._trace = trace
        self._beside_ns = _beside_ns(trace) if co_run else {}

    def matters(self, positions: Sequence[int]) -> bool:
        """Whether the program computes beside any communication at these stream positions.

        True for a communication that the trace does not know.
        """
        return any(
            p >= UNCOVERED_ID_BASE
            or self._beside_ns.get(self._trace.template(p), COMPUTES_NS) >= COMPUTES_NS
            for p in positions
        )


def _beside_ns(trace: RankTrace) -> dict[int, float]:
    """Computation (ns) from each body communication's issue to the first node that waits for it."""
    first, n = trace.n_prologue, trace.n_body
    steady = slice(first, None)
    computes = trace.kind_N[steady] == NodeKind.COMPUTE
    spans = np.where(computes, trace.body_ns_SB.mean(axis=0), 0.0)
    # Two bodies in a row: a communication that is issued in one may be awaited in the next.
    until = np.concatenate([[0.0], np.cumsum(np.tile(spans, 2))])
    found: dict[int, float] = {}
    for reader in np.flatnonzero(computes).tolist():
        for distance in trace.predecessors(first + reader).tolist():
            source = reader - distance
            if -n <= source and not computes[source]:
                beside = float(until[reader + n] - until[source + n])
                node = first + source % n
                # The first node that waits for it ends the overlap.
                found[node] = min(beside, found.get(node, beside))
    return found
