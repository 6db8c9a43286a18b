"""Jitter that the ranks of one machine share, followed while live ranks run.

[Note: common jitter] A machine that is slow for some milliseconds is slow for all ranks on it: in
slices of two on two cores, spans of computation that run at the same time are long together (the
correlation of their logarithms is 0.5 to 0.8). They then hardly wait for each other. A virtual rank
that replayed its captured steps as they are would be late at moments of its own and the live rank
at others, and at every communication all wait for the later one: with 50 communications in a step
that makes tensor parallelism 8 % slower than it is (209 ms of computation and waiting in a step;
226 with the steps of one rank shuffled; 210 as below).

So the part of a virtual rank's jitter that is the machine's comes from the live ranks, and only the
rest from its capture. With correlation ``r`` (measured in slices, 0 where there were none), usual
duration ``B``, captured duration ``b`` and the live rank's ``m = a / A`` at the time, it computes
for ``B (b / B)^sqrt(1 - r^2) m^r``: what two variables of this correlation and like variances are
given the other one. What a live rank has not yet computed cannot be known: a computation of a
virtual rank that begins later than that is left for later, unless its answer is needed now.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.source import NEVER, Duration
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.trace import RankTrace
from prismscale.sim.state import Times, latest

KEPT = 256
"""Moments that are remembered."""
LEAST = 0.5
"""Smallest slowness that is believed: with less, the rank did less work than usual."""
_FAR = 2.0**58


def common_jitter(graph: JobGraph) -> float:
    """How much of their jitter ranks of one machine share: the mean over captured ranks; 0 unless
    all were measured side by side."""
    co_runs = [c.trace.facts.co_run for c in graph.classes]
    found = [co_run.common_jitter if co_run else 0.0 for co_run in co_runs]
    return float(np.mean(found)) if all(found) else 0.0


def with_own_jitter(graph: JobGraph, share: float, live: Iterable[int]) -> JobGraph:
    """The graph whose virtual ranks' computation has only the jitter that is their own."""
    kept = {int(graph.class_of_R[r]) for r in live}
    return replace(
        graph,
        classes=tuple(
            c if c.index in kept else replace(c, trace=_with_own_jitter(c.trace, share))
            for c in graph.classes
        ),
    )


def _with_own_jitter(trace: RankTrace, share: float) -> RankTrace:
    usual_B = np.maximum(np.median(trace.body_ns_SB, axis=0), 1.0)
    # See [Note: common jitter]: B (b / B)^sqrt(1 - r^2).
    own_SB = usual_B * (trace.body_ns_SB / usual_B) ** np.sqrt(1 - share**2)
    rows_SB = np.where(trace.computes_B, np.rint(own_SB), trace.body_ns_SB).astype(np.int64)
    return replace(trace, body_ns_SB=rows_SB)


def share_jitter(
    graph: JobGraph, live: Sequence[int], node_of: Callable[[int], int]
) -> tuple[JobGraph, CommonJitter | None]:
    """The graph to replay beside ``live`` ranks, and how its computation gets on there (None: as in
    the graph, where nothing is known of common jitter)."""
    share = common_jitter(graph)
    if share == 0:
        return graph, None
    return with_own_jitter(graph, share, live), CommonJitter(graph, share, live, node_of)


class MachineTime:
    """Logical time against the computation done in it, as one live rank sees the machine: a line of
    straight pieces. Before and after what was seen it is as usual."""

    def __init__(self, trace: RankTrace, share: float) -> None:
        """``trace``: of the live rank. ``share``: how much of its jitter is the machine's."""
        self._share = share
        self._n_prologue, self._n_body = trace.n_prologue, trace.n_body
        self._usual_ns = _usual_between(trace)
        self._times, self._works = [-_FAR, 0.0, _FAR], [-_FAR, 0.0, _FAR]

    @property
    def known_ns(self) -> int:
        """Until when it is known."""
        return int(self._times[-2])

    def observe(self, position: int, time_ns: int, computed_ns: int, factor: float) -> None:
        """The live rank is at communication ``position`` and has ``computed_ns`` since it was at
        the one before; ``factor`` is how slow the machine is these days."""
        since = float(time_ns - self.known_ns)
        if since <= 0:
            return
        done, steady = since, position - self._n_prologue
        usual_ns = factor * self._usual_ns.get(steady % self._n_body, 0.0) if steady >= 0 else 0.0
        computing = min(computed_ns, since)
        if usual_ns > 0 and computing > 0:
            # What the machine does while the rank waits is not known.
            slowness = max(computing / usual_ns, LEAST)
            # Another rank takes m^r of its usual time, so meanwhile it got m^-r as far.
            done += computing * (slowness**-self._share - 1)
        work = self._works[-2] + done
        # The last piece is replaced; beyond it the machine is as usual until more is known.
        self._times[-1:] = [float(time_ns), time_ns + _FAR]
        self._works[-1:] = [work, work + _FAR]
        if len(self._times) > 2 * KEPT:
            # The oldest pieces become one at the usual pace: both lists step back by as much.
            for kept in (self._times, self._works):
                kept[: KEPT + 1] = [kept[KEPT + 1] - _FAR]

    def end(self, start: int, duration: int) -> float:
        """When computation ends that began at ``start`` and usually takes ``duration``."""
        done = _on_line(self._times, self._works, start)
        return _on_line(self._works, self._times, done + duration)

    def ends(self, start: Times, duration: Duration) -> NDArray[np.float64]:
        """As :meth:`end`, of many."""
        done = np.interp(start, self._times, self._works)
        return np.interp(done + duration, self._works, self._times)


def _on_line(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """``numpy.interp`` of one value, which takes NumPy longer than what surrounds it."""
    i = bisect_right(x, at, 1, len(x) - 1)
    return y[i - 1] + (at - x[i - 1]) * (y[i] - y[i - 1]) / (x[i] - x[i - 1])


def _usual_between(trace: RankTrace) -> dict[int, float]:
    """By body node, of communications: what is usually computed between it and the one before."""
    n, computes_B = trace.n_body, trace.computes_B
    spans_B = np.where(computes_B, np.median(trace.body_ns_SB, axis=0), 0.0)
    until = np.concatenate([[0.0], np.cumsum(np.tile(spans_B, 2))])
    places = np.flatnonzero(~computes_B).tolist()
    if not places:
        return {}
    around = [places[-1], *(p + n for p in places)]
    return {b - n: float(until[b] - until[a]) for a, b in pairwise(around)}


class CommonJitter:
    """How virtual ranks get on beside live ones; see [Note: common jitter]."""

    def __init__(
        self, graph: JobGraph, share: float, live: Iterable[int], node_of: Callable[[int], int]
    ) -> None:
        """``node_of`` tells the machine of a rank: others' jitter is their own."""
        self._seen = {
            r: MachineTime(graph.classes[int(graph.class_of_R[r])].trace, share) for r in live
        }
        self._beside = [self._members_beside(c.members_M, node_of) for c in graph.classes]
        self._is_on_one_machine = [all(at_M.all() for _, at_M in found) for found in self._beside]

    def _members_beside(
        self, members_M: NDArray[np.int64], node_of: Callable[[int], int]
    ) -> list[tuple[MachineTime, NDArray[np.bool_]]]:
        """Live ranks, and which members are on their machine."""
        nodes_M = np.array([node_of(int(r)) for r in members_M])
        beside = [(seen, nodes_M == node_of(r)) for r, seen in self._seen.items()]
        return [(seen, at_M) for seen, at_M in beside if at_M.any()]

    @property
    def known_ns(self) -> int:
        """Until when some live rank has seen the machine."""
        return max(seen.known_ns for seen in self._seen.values())

    def observe(
        self, rank: int, position: int, time_ns: int, computed_ns: int, factor: float
    ) -> None:
        """A live rank arrived; see :meth:`MachineTime.observe`."""
        self._seen[rank].observe(position, time_ns, computed_ns, factor)

    def ends(self, class_index: int, start: Times, duration: Duration) -> Times:
        """When computation of a class ends: as its machine's live ranks see it, on average."""
        plain: Times = start + duration
        beside = self._beside[class_index]
        if not beside or latest(plain) >= NEVER:
            return plain
        if plain.size == 1 and self._is_on_one_machine[class_index]:
            # One value: NumPy would take longer than the arithmetic.
            ends_ns = [seen.end(int(start[0]), int(plain[0] - start[0])) for seen, _ in beside]
            return np.array([round(sum(ends_ns) / len(ends_ns))], dtype=np.int64)
        shape = np.broadcast_shapes(plain.shape, beside[0][1].shape)
        ends, count = np.zeros(shape), np.zeros(shape, dtype=np.int64)
        for seen, at_M in beside:
            ends += np.where(at_M, seen.ends(start, duration), 0.0)
            count += at_M
        return np.where(count > 0, np.rint(ends / np.maximum(count, 1)), plain).astype(np.int64)
