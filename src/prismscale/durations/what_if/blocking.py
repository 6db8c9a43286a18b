"""Edges that make communications block the computing stream.

A communication that overlaps with computation begins as soon as its own stream and the host let it,
and a later node waits for it. A communication that blocks begins after all work that was issued to
the computing stream before it, and all work issued to that stream afterwards begins after it. That
takes two edges for each communication, and no node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.launch_paths import LAUNCH_SUFFIX
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import HOST, RankTrace

_MOST_SEEN = 4096
"""Most nodes that the search for an existing path visits."""


def blocking(
    trace: RankTrace, is_blocking_N: NDArray[np.bool_]
) -> tuple[RankTrace, NDArray[np.bool_]]:
    """Return ``trace`` with edges that make these communications block its computation.

    Also returns which nodes (N) are communications that did not block before.
    """
    walk = _Walk(trace=trace, is_blocking_N=is_blocking_N, lane=_computing_lane(trace))
    walk.over(0, trace.n_prologue, keep_from=0)
    # The body is walked twice, because it begins with the stream as the body before has left it.
    walk.over(trace.n_prologue, trace.n_nodes + trace.n_body, keep_from=trace.n_nodes)
    touched_N = np.zeros(trace.n_nodes, dtype=bool)
    touched_N[sorted(walk.touched)] = True
    return _with_edges(trace, walk.edges), touched_N


def _computing_lane(trace: RankTrace) -> int:
    """Return the stream that computes most, or the host where no stream computes."""
    lanes = trace.lane_N[trace.n_prologue :]
    is_work_B = np.array([_is_work(trace, n) for n in range(trace.n_prologue, trace.n_nodes)])
    spent_ns_B = np.where(trace.computes_B & is_work_B, trace.body_ns_SB.mean(axis=0), 0.0)
    spent_ns = np.bincount(lanes, weights=spent_ns_B, minlength=len(trace.lanes))
    # The host is chosen only where no stream computes.
    weights = np.array([1e-9 if name == HOST else 1.0 for name in trace.lanes])
    return int(np.argmax(spent_ns * weights))


def _is_work(trace: RankTrace, node: int) -> bool:
    return not trace.labels[int(trace.label_N[node])].endswith(LAUNCH_SUFFIX)


@dataclass(kw_only=True)
class _Walk:
    """Walks along the unrolled stream and notes the edges that are missing."""

    trace: RankTrace
    is_blocking_N: NDArray[np.bool_]
    lane: int
    """The lane that computes."""
    edges: dict[int, set[int]] = field(default_factory=dict)
    """Predecessor distances to add, by stored node."""
    touched: set[int] = field(default_factory=set)
    """Stored communications at an end of an added edge."""
    _front: list[int] = field(default_factory=list)
    """Frontier of the computing stream: once these positions have ended, so has all work that was
    issued to it so far."""
    _batch: list[int] = field(default_factory=list)
    """Positions of the blocking communications that came after :attr:`_front`."""

    def over(self, start: int, stop: int, *, keep_from: int) -> None:
        """Walk over positions ``[start, stop)``; edges of those from ``keep_from`` on are kept."""
        self._front, self._batch = [], []
        for position in range(start, stop):
            node = self.trace.template(position)
            if self.trace.kind_N[node] != NodeKind.COMPUTE:
                if self.is_blocking_N[node]:
                    self._communicates(position, position >= keep_from)
            elif self.trace.lane_N[node] == self.lane:
                self._computes(position, node, position >= keep_from)

    def _computes(self, position: int, node: int, keep: bool) -> None:
        if not _is_work(self.trace, node):
            self._front.append(position)
            return
        for communication in self._batch:
            self._after(position, communication, keep)
        self._front, self._batch = [position], []

    def _communicates(self, position: int, keep: bool) -> None:
        """Add a communication: those of one batch run concurrently, and the next batch waits."""
        if self._batch and self._is_issued_with(self._batch[-1], position):
            self._batch.append(position)
        else:
            self._front, self._batch = self._batch or self._front, [position]
        for earlier in self._front:
            self._after(position, earlier, keep)

    def _is_issued_with(self, earlier: int, later: int) -> bool:
        trace = self.trace
        a, b = trace.template(earlier), trace.template(later)
        return (
            later - earlier == 1
            and trace.lane_N[a] == trace.lane_N[b]
            and set(self._before(earlier)) == set(self._before(later))
        )

    def _after(self, later: int, earlier: int, keep: bool) -> None:
        if not keep or self._is_after(later, earlier):
            return
        trace = self.trace
        node = trace.template(later)
        self.edges.setdefault(node, set()).add(later - earlier)
        ends = (trace.template(end) for end in (later, earlier))
        self.touched |= {end for end in ends if self.is_blocking_N[end]}

    def _is_after(self, later: int, earlier: int) -> bool:
        """Return whether the trace already has a path that puts ``later`` after ``earlier``."""
        left, seen = [later], {later}
        while left and len(seen) < _MOST_SEEN:
            for before in self._before(left.pop()):
                if before == earlier:
                    return True
                if before > earlier and before not in seen:
                    seen.add(before)
                    left.append(before)
        return False

    def _before(self, position: int) -> Iterator[int]:
        node = self.trace.template(position)
        return (position - distance for distance in self.trace.predecessors(node).tolist())


def _with_edges(trace: RankTrace, edges: dict[int, set[int]]) -> RankTrace:
    rows = [
        [*trace.predecessors(node).tolist(), *sorted(edges.get(node, ()))]
        for node in range(trace.n_nodes)
    ]
    starts = np.cumsum([0, *map(len, rows)])
    return replace(
        trace,
        pred_start_N1=starts.astype(trace.pred_start_N1.dtype),
        pred_distance_P=np.array(
            [d for row in rows for d in row], dtype=trace.pred_distance_P.dtype
        ),
    )
