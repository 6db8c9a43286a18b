"""Attribution of a rank's step to computation, exposed communication, and waiting for other ranks.

Follows the computations of the last simulated step in stream order. A gap before a computation is
attributed to the predecessor that ended last. The part of the gap that this communication took
after its last arrival is *exposed communication* of its group. The rest is *waiting*: for a
pipeline neighbour (bubble), or for the last member of a collective or the other end of a message
outside the pipeline (skew).
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
from prismscale.graph.pipeline import messages_of, pipeline_groups, smallest_group
from prismscale.graph.trace import HOST, RankTrace
from prismscale.sim.timeline import RankTimeline, Timeline

COMPUTATION = "computation"
"""Phase of computations without a label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """One rank's steady step, in nanoseconds. The parts add up to :attr:`step_ns`."""

    rank: int
    step_ns: int
    compute_ns: Mapping[str, int] = field(default_factory=dict)
    """Computation by phase: forward, backward, optimizer. ``forward, host`` is the time in which
    the device is idle and waits for the host."""
    exposed_ns: Mapping[str, int] = field(default_factory=dict)
    """Communication that is not hidden by computation, by group name."""
    moved_ns: Mapping[str, int] = field(default_factory=dict)
    """Time in which communication moves data, hidden or not, by group name. Not in the sum."""
    bubble_ns: int = 0
    """Waiting for a pipeline neighbour."""
    skew_ns: int = 0
    """Waiting for the last member of a collective, or for a peer that is no pipeline neighbour."""

    @property
    def total_compute_ns(self) -> int:
        """Total computation of all phases."""
        return sum(self.compute_ns.values())

    @property
    def host_ns(self) -> int:
        """Part of computation in which a modelled device waits for the host; else 0."""
        own = (ns for name, ns in self.compute_ns.items() if name.endswith(LAUNCH_SUFFIX))
        return sum(own)

    @property
    def total_exposed_ns(self) -> int:
        """Total exposed communication of all groups."""
        return sum(self.exposed_ns.values())


def break_down(timeline: Timeline, rank: int) -> Breakdown:
    """Attribute the last simulated step that ``rank`` ends. Its length is 0 if the rank ends none.

    ``rank`` must be among ``timeline.ranks``, and its nodes must come from a simulation.
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
    names_C = np.array(trace.labels, dtype=object)[trace.label_N[nodes_N[row_C]]]
    is_work_C = (_on_stream_N(trace) & ~is_launch_path_N(trace))[nodes_N[row_C]]
    idle_ns_C = _idle_ns(own_ns_C, start_ns_C, end_ns_C, is_work_C)
    exposed: dict[str, int] = {}
    in_pipeline_N = _in_pipeline_N(trace)
    bubble = skew = 0
    for at in np.flatnonzero(start_ns_C > clock_ns_C):
        gap = int(start_ns_C[at] - clock_ns_C[at])
        cause = last_predecessor(seen, rank_class, int(row_C[at]))
        node, name, took = _cost_of(seen, trace, cause)
        transfer = min(gap, took)
        exposed[name] = exposed.get(name, 0) + transfer
        if in_pipeline_N[node]:
            bubble += gap - transfer
        else:
            skew += gap - transfer
    row_M = first + np.flatnonzero(~computes_N[first:])
    took_ns_M = seen.end_ns_N[row_M] - seen.moves_from_ns_N[row_M]
    return Breakdown(
        rank=rank,
        step_ns=int(clock_ns_C1[-1]) - began,
        compute_ns=_phases(names_C, own_ns_C, idle_ns_C),
        exposed_ns={k: v for k, v in exposed.items() if v},
        moved_ns=_sums(trace.group_index_N[nodes_N[row_M]], took_ns_M, trace.group_label),
        bubble_ns=bubble,
        skew_ns=skew,
    )


def _beyond(
    start_ns_C: NDArray[np.int64], end_ns_C: NDArray[np.int64], began: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the own time of each computation, and a running clock.

    Own time is the part of a computation after the end of all computations before it. The clock
    holds the latest end before each computation, and in its last entry the latest end of all.
    """
    clock_ns_C1 = np.maximum.accumulate(np.concatenate([[began], end_ns_C]))
    return np.maximum(end_ns_C - np.maximum(start_ns_C, clock_ns_C1[:-1]), 0), clock_ns_C1


def _in_pipeline_N(trace: RankTrace) -> NDArray[np.bool_]:
    """Return True for messages to and from pipeline neighbours."""
    stages, in_pipeline_N = set(pipeline_groups(trace)), np.zeros(trace.n_nodes, dtype=bool)
    for group_index, peer in messages_of(trace):
        if smallest_group(trace, group_index, peer) in stages:
            in_pipeline_N |= (trace.group_index_N == group_index) & (trace.peer_N == peer)
    return in_pipeline_N & trace.is_message_N


def _on_stream_N(trace: RankTrace) -> NDArray[np.bool_]:
    """Return True for nodes on a stream of a device."""
    return np.array([lane != HOST for lane in trace.lanes])[trace.lane_N]


def _idle_ns(
    own_ns_C: NDArray[np.int64],
    start_ns_C: NDArray[np.int64],
    end_ns_C: NDArray[np.int64],
    is_work_C: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Return the part of each computation's own time, which ends with it, in which no stream works.

    A launch path may end later than the work that was recorded before it, while a stream whose work
    is recorded later computes.
    """
    order = np.argsort(start_ns_C[is_work_C])
    starts, ends = start_ns_C[is_work_C][order], end_ns_C[is_work_C][order]
    busy_ns_W, clock_ns_W1 = _beyond(starts, ends, began=0)
    total_ns_W1 = np.concatenate([[0], np.cumsum(busy_ns_W)])

    def busy_until(at_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        begun = np.searchsorted(starts, at_ns)
        # What has begun may last beyond that time.
        return total_ns_W1[begun] - np.maximum(clock_ns_W1[begun] - at_ns, 0)

    return own_ns_C - (busy_until(end_ns_C) - busy_until(end_ns_C - own_ns_C))


def _phases(
    names_C: NDArray[Any], own_ns_C: NDArray[np.int64], idle_ns_C: NDArray[np.int64]
) -> dict[str, int]:
    """Sum computations by phase. Waiting for the host counts while the device is idle; for the rest
    of its time the device works on the same phase."""
    out: dict[str, int] = {}
    for name, own_ns, idle_ns in zip(
        names_C.tolist(), own_ns_C.tolist(), idle_ns_C.tolist(), strict=True
    ):
        phase = name.removesuffix(LAUNCH_SUFFIX)
        hidden_ns = 0 if phase == name else own_ns - idle_ns
        if hidden_ns:
            out[phase or COMPUTATION] = out.get(phase or COMPUTATION, 0) + hidden_ns
        out[name or COMPUTATION] = out.get(name or COMPUTATION, 0) + own_ns - hidden_ns
    return out


def _sums(
    index_N: NDArray[Any], ns_N: NDArray[np.int64], name: Callable[[int], str]
) -> dict[str, int]:
    """Sum ``ns_N`` by the name of each index, in the order in which the indices first appear."""
    found, first, inverse = np.unique(index_N, return_index=True, return_inverse=True)
    sums = np.zeros(len(found), dtype=np.int64)
    np.add.at(sums, inverse.reshape(-1), ns_N)
    out: dict[str, int] = {}
    for i in np.argsort(first):
        # Several groups may share a name.
        label = name(int(found[i]))
        out[label] = out.get(label, 0) + int(sums[i])
    return out


def _last_step(seen: RankTimeline, n_body: int) -> tuple[int, int]:
    """Return rows ``[first, stop)`` of the last step that ends; empty if a hang leaves none."""
    stop = len(seen.end_ns_N)
    while stop >= n_body > 0:
        if int(seen.end_ns_N[stop - n_body : stop].max()) < NEVER:
            return stop - n_body, stop
        stop -= n_body
    return 0, 0


def last_predecessor(seen: RankTimeline, rank_class: RankClass, row: int) -> int:
    """Return the row of the simulated predecessor of ``row`` that ended last."""
    node = rank_class.trace.template(seen.first_position + row)
    rows = [row - d for d in rank_class.trace.predecessors(node).tolist() if row >= d]
    return max(rows, key=lambda r: int(seen.end_ns_N[r]))


def _cost_of(seen: RankTimeline, trace: RankTrace, row: int) -> tuple[int, str, int]:
    """Return the node at ``row``, the name to attribute it to, and its duration.

    The duration of a communication runs from its last arrival to its end in the simulation, which
    takes measured durations where there are some. For a computation 0 is returned.
    """
    node = trace.template(seen.first_position + row)
    if trace.kind_N[node] == NodeKind.COMPUTE:
        return node, "computation", 0
    name = trace.group_label(int(trace.group_index_N[node]))
    return node, name, int(seen.end_ns_N[row] - seen.moves_from_ns_N[row])
