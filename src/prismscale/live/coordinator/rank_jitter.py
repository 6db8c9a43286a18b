"""Jitter that the ranks of one machine share, followed while live ranks run.

[Note: common jitter] A machine that is slow for some milliseconds is slow for all ranks on it. In
slices of two ranks on two cores, spans of computation that run at the same time are long together:
the correlation of their logarithms is 0.5 to 0.8. Such ranks hardly wait for each other. A virtual
rank that replayed its captured steps unchanged would be late at other moments than the live rank,
and at every communication both would wait for the later one. With 50 communications in a step, this
makes tensor parallelism 8 % slower than it is: computation and waiting take 209 ms of a step, but
226 ms if the steps of one rank are shuffled, and 210 ms with the method below.

So the machine's part of a virtual rank's jitter comes from the live ranks, and only the rest from
its capture. With correlation ``r`` (measured in slices; 0 if there were none), usual duration
``B``, captured duration ``b``, and the live rank's ratio ``m = a / A`` of actual to usual duration
at the time, it computes for ``B (b / B)^sqrt(1 - r^2) m^r``: one of two variables with this
correlation and equal variances, given the other one. Beyond the live ranks' computation so far,
nothing is known about the machine. A virtual rank's computation that begins after that point is
held back, unless a live rank needs its result now.
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
"""Number of moments that are remembered."""
LEAST = 0.5
"""Smallest slowness that is believed. A smaller one means that the rank did less work."""
_FAR = 2.0**58


def common_jitter(graph: JobGraph) -> float:
    """Share of jitter that ranks of one machine have in common.

    This is the mean over captured ranks; 0 unless all of them were measured side by side.
    """
    co_runs = [c.trace.facts.co_run for c in graph.classes]
    found = [co_run.common_jitter if co_run else 0.0 for co_run in co_runs]
    return float(np.mean(found)) if all(found) else 0.0


def with_own_jitter(graph: JobGraph, share: float, live: Iterable[int]) -> JobGraph:
    """The graph with only their own jitter in the computation of virtual ranks."""
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
    """The graph to replay beside ``live`` ranks, and the progress of its computation there.

    Where no common jitter is known, these are the unchanged graph and None.
    """
    share = common_jitter(graph)
    if share == 0:
        return graph, None
    return with_own_jitter(graph, share, live), CommonJitter(graph, share, live, node_of)


class MachineTime:
    """Computation done by each logical time, as one live rank sees the machine.

    The function is piecewise linear. Outside the observed time the machine runs as usual.
    """

    def __init__(self, trace: RankTrace, share: float) -> None:
        """``trace`` is the live rank's. ``share`` is the machine's share of its jitter."""
        self._share = share
        self._n_prologue, self._n_body = trace.n_prologue, trace.n_body
        self._usual_ns = _usual_between(trace)
        self._times, self._works = [-_FAR, 0.0, _FAR], [-_FAR, 0.0, _FAR]

    @property
    def known_ns(self) -> int:
        """Logical time until which the machine was observed."""
        return int(self._times[-2])

    def observe(self, position: int, time_ns: int, computed_ns: int, factor: float) -> None:
        """Note that the live rank reached communication ``position`` at ``time_ns``.

        It computed for ``computed_ns`` since the communication before. ``factor`` is the slowness
        of the machine over the last steps.
        """
        since = float(time_ns - self.known_ns)
        if since <= 0:
            return
        done, steady = since, position - self._n_prologue
        usual_ns = factor * self._usual_ns.get(steady % self._n_body, 0.0) if steady >= 0 else 0.0
        computing = min(computed_ns, since)
        if usual_ns > 0 and computing > 0:
            # How fast the machine runs while the rank waits is not known.
            slowness = max(computing / usual_ns, LEAST)
            # Another rank takes m^r times its usual time, so it got m^-r times as far meanwhile.
            done += computing * (slowness**-self._share - 1)
        work = self._works[-2] + done
        # Replace the last piece. Beyond it the machine runs as usual until more is known.
        self._times[-1:] = [float(time_ns), time_ns + _FAR]
        self._works[-1:] = [work, work + _FAR]
        if len(self._times) > 2 * KEPT:
            # Merge the oldest pieces into one at the usual pace: both lists step back by as much.
            for kept in (self._times, self._works):
                kept[: KEPT + 1] = [kept[KEPT + 1] - _FAR]

    def end(self, start: int, duration: int) -> float:
        """End of a computation that begins at ``start`` and usually takes ``duration``."""
        done = _on_line(self._times, self._works, start)
        return _on_line(self._works, self._times, done + duration)

    def ends(self, start: Times, duration: Duration) -> NDArray[np.float64]:
        """The same as :meth:`end`, for arrays."""
        done = np.interp(start, self._times, self._works)
        return np.interp(done + duration, self._works, self._times)


def _on_line(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """``numpy.interp`` of one value. NumPy itself would take longer than the code around it."""
    i = bisect_right(x, at, 1, len(x) - 1)
    return y[i - 1] + (at - x[i - 1]) * (y[i] - y[i - 1]) / (x[i] - x[i - 1])


def _usual_between(trace: RankTrace) -> dict[int, float]:
    """Usual computation between each communication and the one before, by its body node."""
    n, computes_B = trace.n_body, trace.computes_B
    spans_B = np.where(computes_B, np.median(trace.body_ns_SB, axis=0), 0.0)
    until = np.concatenate([[0.0], np.cumsum(np.tile(spans_B, 2))])
    places = np.flatnonzero(~computes_B).tolist()
    if not places:
        return {}
    around = [places[-1], *(p + n for p in places)]
    return {b - n: float(until[b] - until[a]) for a, b in pairwise(around)}


class CommonJitter:
    """Progress of virtual ranks' computation beside live ranks; see [Note: common jitter]."""

    def __init__(
        self, graph: JobGraph, share: float, live: Iterable[int], node_of: Callable[[int], int]
    ) -> None:
        """``node_of`` gives a rank's machine. Ranks of other machines keep their own jitter."""
        self._seen = {
            r: MachineTime(graph.classes[int(graph.class_of_R[r])].trace, share) for r in live
        }
        self._beside = [self._members_beside(c.members_M, node_of) for c in graph.classes]
        self._is_on_one_machine = [all(at_M.all() for _, at_M in found) for found in self._beside]

    def _members_beside(
        self, members_M: NDArray[np.int64], node_of: Callable[[int], int]
    ) -> list[tuple[MachineTime, NDArray[np.bool_]]]:
        """Each live rank with any of the members on its machine, and which members those are."""
        nodes_M = np.array([node_of(int(r)) for r in members_M])
        beside = [(seen, nodes_M == node_of(r)) for r, seen in self._seen.items()]
        return [(seen, at_M) for seen, at_M in beside if at_M.any()]

    @property
    def known_ns(self) -> int:
        """Logical time until which some live rank has observed the machine."""
        return max(seen.known_ns for seen in self._seen.values())

    def observe(
        self, rank: int, position: int, time_ns: int, computed_ns: int, factor: float
    ) -> None:
        """Note a live rank's arrival; see :meth:`MachineTime.observe`."""
        self._seen[rank].observe(position, time_ns, computed_ns, factor)

    def ends(self, class_index: int, start: Times, duration: Duration) -> Times:
        """End of a class's computation: the mean over what its machine's live ranks observed."""
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
