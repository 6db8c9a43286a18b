"""How few switches any order of ranks in so many slots can have: a bound, from what ranks wait for.

A rank that waits for a collective of more members than slots goes on only after all of them have
issued it. When the last one does, at most as many members as there are slots have one; each of the
others must be resumed before it can issue what it issues after its wait. So of a *chain* of a
rank's collectives, each issued after the one before was waited for, every collective costs a resume
of each member that has it in its chain, less one for each slot; and resumes of one rank for two
links of its chain are two. Chains are the longest there are: of all waits, the earliest next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import RankTrace

FOR_ALL = frozenset(
    {
        CollectiveOp.ALL_REDUCE,
        CollectiveOp.ALL_GATHER,
        CollectiveOp.REDUCE_SCATTER,
        CollectiveOp.ALL_TO_ALL,
        CollectiveOp.BARRIER,
    }
)
"""Each member waits for all."""


def fewest_switches(traces: Iterable[RankTrace], slots: int, bodies: int) -> int:
    """Of a job whose ranks run their prologue and ``bodies`` steady steps (the first of which is
    the prologue's neighbour)."""
    chained = Counter(link for trace in traces for link in _chain(trace, slots, bodies))
    return sum(max(0, members - slots) for members in chained.values())


def _chain(trace: RankTrace, slots: int, bodies: int) -> list[tuple[object, ...]]:
    """The collectives of a longest chain, each by a name that all its members have for it."""
    n_nodes = trace.n_prologue + bodies * trace.n_body
    numbers: Counter[tuple[int, int]] = Counter()
    links: list[tuple[object, ...]] = []
    waits = _waits(trace, n_nodes)
    free_at = -1
    open_: list[tuple[int, int, tuple[object, ...]]] = []
    for position in range(n_nodes):
        node = trace.template(position)
        if trace.kind_N[node] != NodeKind.COLLECTIVE:
            continue
        group, op = int(trace.group_index_N[node]), CollectiveOp(trace.op_N[node])
        ranks = trace.groups[group].ranks
        numbers[group, int(op)] += 1
        wait = waits.get(position)
        if op in FOR_ALL and len(ranks) > slots and wait is not None:
            twins = sum(other.ranks == ranks for other in trace.groups[:group])
            collective = (ranks, twins, int(op), numbers[group, int(op)])
            open_.append((wait, position, collective))
    # Earliest end first: no other choice has more disjoint intervals.
    for wait, position, name in sorted(open_, key=lambda link: link[:2]):
        if position >= free_at:
            links.append(name)
            free_at = wait
    return links


def _waits(trace: RankTrace, n_nodes: int) -> dict[int, int]:
    """By position of a communication: the first computation that cannot begin before its end."""
    found: dict[int, int] = {}
    for position in range(n_nodes):
        node = trace.template(position)
        if trace.kind_N[node] != NodeKind.COMPUTE:
            continue
        for distance in trace.predecessors(node).tolist():
            found.setdefault(position - distance, position)
    return found
