"""Where a rank's step goes: computation, exposed communication, and waiting for others.

Walks the program's own lane through the last simulated step. A gap before a computation is the
fault of the predecessor that ended last; what that communication took after its last arrival is
*exposed communication* of its group, the rest is *waiting*: for a pipeline neighbour (bubble) or
for the slowest member of a group (skew).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prismscale.durations.source import NEVER
from prismscale.graph.job_graph import RankClass
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import RankTrace
from prismscale.sim.timeline import RankTimeline, Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """One rank's steady step, in nanoseconds. The parts add up to :attr:`step_ns`."""

    rank: int
    step_ns: int
    compute_ns: Mapping[str, int] = field(default_factory=dict)
    """By phase: forward, backward, optimizer."""
    exposed_ns: Mapping[str, int] = field(default_factory=dict)
    """Communication that nothing hides, by group name."""
    moved_ns: Mapping[str, int] = field(default_factory=dict)
    """Time in which communication moves data, hidden or not, by group name; no part of the sum."""
    bubble_ns: int = 0
    """Waiting for a pipeline neighbour."""
    skew_ns: int = 0
    """Waiting for the last member of a collective."""

    @property
    def total_compute_ns(self) -> int:
        """All computation."""
        return sum(self.compute_ns.values())

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
    first, n = _last_step(seen, trace.n_body)
    compute: dict[str, int] = {}
    exposed: dict[str, int] = {}
    bubble = skew = 0
    clock = _end_before(seen, rank_class, first)
    began = clock
    for row in range(first, n):
        node = trace.template(seen.first_position + row)
        if trace.kind_N[node] != NodeKind.COMPUTE:
            continue
        start, end = int(seen.start_ns_N[row]), int(seen.end_ns_N[row])
        gap = start - clock
        if gap > 0:
            cause = last_predecessor(seen, rank_class, row)
            kind, name, took = _cost_of(seen, trace, cause)
            transfer = min(gap, took)
            exposed[name] = exposed.get(name, 0) + transfer
            if kind == NodeKind.COLLECTIVE:
                skew += gap - transfer
            else:
                bubble += gap - transfer
        label = trace.labels[int(trace.label_N[node])] or "computation"
        # What a computation on another lane already accounts for is not counted twice.
        compute[label] = compute.get(label, 0) + max(0, end - max(start, clock))
        clock = max(clock, end)
    return Breakdown(
        rank=rank,
        step_ns=clock - began,
        compute_ns=compute,
        exposed_ns={k: v for k, v in exposed.items() if v},
        moved_ns=_moved(seen, trace, range(first, n)),
        bubble_ns=bubble,
        skew_ns=skew,
    )


def _moved(seen: RankTimeline, trace: RankTrace, rows: range) -> dict[str, int]:
    moved: dict[str, int] = {}
    for row in rows:
        if trace.communicates_N[trace.template(seen.first_position + row)]:
            _, name, took = _cost_of(seen, trace, row)
            moved[name] = moved.get(name, 0) + took
    return moved


def _end_before(seen: RankTimeline, rank_class: RankClass, first: int) -> int:
    trace = rank_class.trace
    ends = (
        int(seen.end_ns_N[row])
        for row in range(first)
        if trace.kind_N[trace.template(seen.first_position + row)] == NodeKind.COMPUTE
    )
    return max(ends, default=0)


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
