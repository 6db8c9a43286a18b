"""Where a rank's step goes: computation, exposed communication, and waiting for others.

Walks the program's own lane through the last simulated step. A gap before a computation is the
fault of the predecessor that ended last; what that communication took after its last arrival is
*exposed communication* of its group, the rest is *waiting*: for a pipeline neighbour (bubble) or
for the slowest member of a group (skew).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.source import NEVER
from prismscale.graph.job_graph import RankClass
from prismscale.graph.launch_paths import LAUNCH_SUFFIX, is_launch_path_N
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import HOST, RankTrace
from prismscale.sim.timeline import RankTimeline, Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """One rank's steady step, in nanoseconds. The parts add up to :attr:`step_ns`."""

    rank: int
    step_ns: int
    compute_ns: Mapping[str, int] = field(default_factory=dict)
    """By phase: forward, backward, optimizer; ``forward, host`` is what the host takes while the
    device has nothing to do."""
    exposed_ns: Mapping[str, int] = field(default_factory=dict)
    """Communication that nothing hides, by group name."""
    moved_ns: Mapping[str, int] = field(default_factory=dict)
    """Time in which communication moves data, hidden or not, by group name; no part of the sum."""
    bubble_ns: int = 0
    """Waiting for a pipeline neighbour."""
    skew_ns: int = 0
    """Waiting for the last member of a collective."""
    beside_ns: int = 0
    """Modelled kernels that run beside those of another stream; no part of the sum. Each is priced
    as if it had the GPU to itself: were they to take turns, the step could be so much longer."""

    @property
    def total_compute_ns(self) -> int:
        """All computation."""
        return sum(self.compute_ns.values())

    @property
    def host_ns(self) -> int:
        """Of computation, where the device waits for the host; modelled devices alone tell."""
        own = (ns for name, ns in self.compute_ns.items() if name.endswith(LAUNCH_SUFFIX))
        return sum(own)

    @property
    def total_exposed_ns(self) -> int:
        """All exposed communication."""
        return sum(self.exposed_ns.values())


def break_down(timeline: Timeline, rank: int) -> Breakdown:
    """Attribute the last simulated step that ``rank`` ends; of length 0 where it ends none.

    ``rank`` must be among ``timeline.ranks``, as simulated.
    """
    seen = timeline.ranks[rank]
    rank_class = timeline.graph.classes[seen.class_index]
    trace = rank_class.trace
    first, stop = _last_step(seen, trace.n_body)
    nodes_N = trace.templates(seen.first_position, stop)
    computes_N = trace.kind_N[nodes_N] == NodeKind.COMPUTE
    began = int(seen.end_ns_N[:first][computes_N[:first]].max(initial=0))
    # Axis C: computations of the step, in stream order.
    row_C = first + np.flatnonzero(computes_N[first:])
    start_ns_C, end_ns_C = seen.start_ns_N[row_C], seen.end_ns_N[row_C]
    own_ns_C, clock_ns_C1 = _beyond(start_ns_C, end_ns_C, began)
    clock_ns_C = clock_ns_C1[:-1]
    labels_C = trace.label_N[nodes_N[row_C]]
    exposed: dict[str, int] = {}
    bubble = skew = 0
    for at in np.flatnonzero(start_ns_C > clock_ns_C):
        gap = int(start_ns_C[at] - clock_ns_C[at])
        cause = last_predecessor(seen, rank_class, int(row_C[at]))
        kind, name, took = _cost_of(seen, trace, cause)
        transfer = min(gap, took)
        exposed[name] = exposed.get(name, 0) + transfer
        if kind == NodeKind.COLLECTIVE:
            skew += gap - transfer
        else:
            bubble += gap - transfer
    row_M = first + np.flatnonzero(~computes_N[first:])
    took_ns_M = seen.end_ns_N[row_M] - seen.moves_from_ns_N[row_M]
    return Breakdown(
        rank=rank,
        step_ns=int(clock_ns_C1[-1]) - began,
        compute_ns=_sums(labels_C, own_ns_C, lambda i: trace.labels[i] or "computation"),
        exposed_ns={k: v for k, v in exposed.items() if v},
        moved_ns=_sums(trace.group_index_N[nodes_N[row_M]], took_ns_M, trace.group_label),
        bubble_ns=bubble,
        skew_ns=skew,
        beside_ns=_beside_ns(trace, nodes_N[row_C], start_ns_C, end_ns_C),
    )


def _beyond(
    start_ns_C: NDArray[np.int64], end_ns_C: NDArray[np.int64], began: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What each of some computations takes that none before it accounts for, and what ended last
    before each of them, and after all of them."""
    clock_ns_C1 = np.maximum.accumulate(np.concatenate([[began], end_ns_C]))
    return np.maximum(end_ns_C - np.maximum(start_ns_C, clock_ns_C1[:-1]), 0), clock_ns_C1


def _beside_ns(
    trace: RankTrace,
    nodes_C: NDArray[np.int64],
    start_ns_C: NDArray[np.int64],
    end_ns_C: NDArray[np.int64],
) -> int:
    """What streams compute in all, less the time in which any of them does."""
    if not trace.facts.modelled:
        # What was measured has what ran beside it in it.
        return 0
    on_stream = np.array([lane != HOST for lane in trace.lanes])
    is_work_N = on_stream[trace.lane_N] & ~is_launch_path_N(trace)
    starts, ends = start_ns_C[is_work_N[nodes_C]], end_ns_C[is_work_N[nodes_C]]
    order = np.argsort(starts)
    busy_ns_W, _ = _beyond(starts[order], ends[order], began=0)
    return int((ends - starts).sum() - busy_ns_W.sum())


def _sums(
    index_N: NDArray[Any], ns_N: NDArray[np.int64], name: Callable[[int], str]
) -> dict[str, int]:
    """Sums by name of each index, in the order in which indices come first."""
    found, first, inverse = np.unique(index_N, return_index=True, return_inverse=True)
    sums = np.zeros(len(found), dtype=np.int64)
    np.add.at(sums, inverse.reshape(-1), ns_N)
    out: dict[str, int] = {}
    for i in np.argsort(first):
        # Several groups may have one name.
        label = name(int(found[i]))
        out[label] = out.get(label, 0) + int(sums[i])
    return out


def _last_step(seen: RankTimeline, n_body: int) -> tuple[int, int]:
    """Rows ``[first, stop)`` of the last step that ends; empty where a hang leaves none."""
    stop = len(seen.end_ns_N)
    while stop >= n_body > 0:
        if int(seen.end_ns_N[stop - n_body : stop].max()) < NEVER:
            return stop - n_body, stop
        stop -= n_body
    return 0, 0


def last_predecessor(seen: RankTimeline, rank_class: RankClass, row: int) -> int:
    """Row of the predecessor of ``row`` that ended last, among those that were simulated."""
    node = rank_class.trace.template(seen.first_position + row)
    rows = [row - d for d in rank_class.trace.predecessors(node).tolist() if row >= d]
    return max(rows, key=lambda r: int(seen.end_ns_N[r]))


def _cost_of(seen: RankTimeline, trace: RankTrace, row: int) -> tuple[int, str, int]:
    """Kind, whose it is, and what it took after its last arrival as simulated: as measured, where
    it was."""
    node = trace.template(seen.first_position + row)
    kind, group_index = int(trace.kind_N[node]), int(trace.group_index_N[node])
    if kind == NodeKind.COMPUTE:
        return kind, "computation", 0
    name = trace.group_label(group_index)
    return kind, name, int(seen.end_ns_N[row] - seen.moves_from_ns_N[row])
