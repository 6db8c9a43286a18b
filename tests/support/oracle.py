"""The oracle: a slow, obvious, event-driven simulator of single ranks that the engine must equal.

It shares no code with the engine. The job is spread out to one program per rank and one object per
node; a heap hands out events in order of time; ranks meet in plain dictionaries.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prismscale.durations.source import DurationSource
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import RankTrace

Node = tuple[int, int]
"""(rank, stream position)"""


@dataclass(kw_only=True)
class RankProgram:
    """What one rank runs, and its process groups by group index."""

    trace: RankTrace
    groups: list[tuple[int, ...]]


@dataclass(kw_only=True)
class Result:
    """Times by (rank, stream position), and step ends by (rank, step)."""

    start: dict[Node, int] = field(default_factory=dict)
    ready: dict[Node, int] = field(default_factory=dict)
    end: dict[Node, int] = field(default_factory=dict)
    step_end: dict[Node, int] = field(default_factory=dict)
    unfinished: list[Node] = field(default_factory=list)


def expand(graph: JobGraph) -> dict[int, RankProgram]:
    """One program per rank."""
    programs = {}
    for rank_class in graph.classes:
        for member, rank in enumerate(rank_class.members_M.tolist()):
            tables = [(graph.families[s.family].ranks_KG, s.group_M) for s in rank_class.slots]
            groups = [tuple(ranks_KG[:, group_M[member]].tolist()) for ranks_KG, group_M in tables]
            programs[rank] = RankProgram(trace=rank_class.trace, groups=groups)
    return programs


def simulate_ranks(
    graph: JobGraph,
    durations: DurationSource,
    *,
    steps: int,
    with_prologue: bool = False,
    draw: int = 0,
) -> Result:
    """Walk all events of all ranks in order of time."""
    return _Walk(graph, durations, steps, with_prologue, draw).run()


def reachable(graph: JobGraph, origin: Node, *, steps: int) -> set[Node]:
    """Every node that can feel a delay of ``origin``, itself included (steady steps only)."""
    no_durations: Any = None
    return _Walk(graph, no_durations, steps, False, 0).reachable(origin)


class _Walk:
    def __init__(
        self,
        graph: JobGraph,
        durations: DurationSource,
        steps: int,
        with_prologue: bool,
        draw: int,
    ) -> None:
        self._graph, self._durations, self._draw = graph, durations, draw
        self._steps = steps
        self._programs = expand(graph)
        self._with_prologue = with_prologue
        self._waits_for: dict[Node, int] = {}
        self._unblocks: dict[Node, list[Node]] = defaultdict(list)
        self._instance_of: dict[Node, Hashable] = {}
        self._members: dict[Hashable, list[Node]] = defaultdict(list)
        self._events: list[tuple[int, int, str, Node]] = []
        self._ticket = itertools.count()
        self._result = Result()

    def run(self) -> Result:
        for rank, program in self._programs.items():
            self._prepare(rank, program)
        for node in [n for n, count in self._waits_for.items() if count == 0]:
            self._push(0, "start", node)
        while self._events:
            time, _, what, node = heapq.heappop(self._events)
            if what == "start":
                self._start(node, time)
            else:
                self._end(node, time)
        result = self._result
        result.unfinished = [n for n in self._waits_for if n not in result.end]
        return result

    def reachable(self, origin: Node) -> set[Node]:
        for rank, program in self._programs.items():
            self._prepare(rank, program)
        found, open_nodes = {origin}, [origin]
        while open_nodes:
            node = open_nodes.pop()
            instance = self._instance_of.get(node)
            together = self._members[instance] if instance is not None else []
            fresh = {*self._unblocks[node], *together} - found
            found |= fresh
            open_nodes.extend(fresh)
        return found

    def _stream(self, trace: RankTrace) -> Iterator[tuple[int, int]]:
        """(stream position, template node) of everything that is to be run."""
        if self._with_prologue:
            yield from ((i, i) for i in range(trace.n_prologue))
        for step in range(self._steps):
            for i in range(trace.n_prologue, trace.n_nodes):
                yield i + step * trace.n_body, i

    def _prepare(self, rank: int, program: RankProgram) -> None:
        trace = program.trace
        first = 0 if self._with_prologue else trace.n_prologue
        uses: dict[Hashable, int] = defaultdict(int)
        for position, i in self._stream(trace):
            sources = {position - int(d) for d in trace.predecessors(i)}
            sources = {s for s in sources if s >= first}
            self._waits_for[rank, position] = len(sources)
            for source in sources:
                self._unblocks[rank, source].append((rank, position))
            if trace.kind_N[i] != NodeKind.COMPUTE:
                channel = _channel(rank, program, i)
                instance = (channel, uses[channel])
                uses[channel] += 1
                self._instance_of[rank, position] = instance
                self._members[instance].append((rank, position))

    def _start(self, node: Node, time: int) -> None:
        self._result.start[node] = time
        instance = self._instance_of.get(node)
        if instance is None:
            self._result.ready[node] = time
            self._push(time + self._lasts(node), "end", node)
            return
        members = self._members[instance]
        everybody = len(_awaited(instance)) == len(members)
        if everybody and all(m in self._result.start for m in members):
            # Events come in order of time: the one that completes the instance is the last arrival.
            lasts = self._lasts(self._speaker(instance))
            for member in members:
                self._result.ready[member] = time
                self._push(time + lasts, "end", member)

    def _end(self, node: Node, time: int) -> None:
        self._result.end[node] = time
        rank, position = node
        trace = self._programs[rank].trace
        past = position - trace.n_prologue
        if past >= 0:
            # Events come in order of time: the last one stays.
            self._result.step_end[rank, past // trace.n_body] = time
        for reader in self._unblocks[node]:
            self._waits_for[reader] -= 1
            if self._waits_for[reader] == 0:
                self._push(time, "start", reader)

    def _speaker(self, instance: Hashable) -> Node:
        """Who knows how long it lasts: group rank 0 of a collective, the sender of a message."""
        rank = _awaited(instance)[0]
        return next(n for n in self._members[instance] if n[0] == rank)

    def _lasts(self, node: Node) -> int:
        rank, position = node
        rank_class = self._graph.classes[int(self._graph.class_of_R[rank])]
        member = rank_class.members_M.tolist().index(rank)
        trace = rank_class.trace
        if position < trace.n_prologue:
            template, table = position, self._durations.prologue(rank_class.index)
        else:
            step, template = divmod(position - trace.n_prologue, trace.n_body)
            table = self._durations.body(rank_class.index, step)
        i = trace.template(position)
        if trace.kind_N[i] != NodeKind.COMPUTE:
            member = int(rank_class.slots[int(trace.group_index_N[i])].group_M[member])
        return _pick(table[template], self._draw, member)

    def _push(self, time: int, what: str, node: Node) -> None:
        heapq.heappush(self._events, (time, next(self._ticket), what, node))


def _channel(rank: int, program: RankProgram, i: int) -> Hashable:
    trace = program.trace
    group_index = int(trace.group_index_N[i])
    ranks = program.groups[group_index]
    twin = program.groups[:group_index].count(ranks)
    if trace.kind_N[i] == NodeKind.COLLECTIVE:
        return (ranks, twin, "collective", ranks)
    peer = ranks[(ranks.index(rank) + int(trace.peer_N[i])) % len(ranks)]
    pair = (rank, peer) if trace.kind_N[i] == NodeKind.SEND else (peer, rank)
    return (ranks, twin, "message", pair)


def _awaited(instance: Any) -> tuple[int, ...]:
    (*_, awaited), _ = instance
    return awaited


def _pick(duration: Any, draw: int, column: int) -> int:
    table = np.atleast_2d(np.asarray(duration))
    return int(table[min(draw, table.shape[0] - 1), min(column, table.shape[1] - 1)])
