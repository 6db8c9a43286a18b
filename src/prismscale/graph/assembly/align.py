"""Brings all traces of a job to one step before their bodies begin.

A body begins where its own rank's program had settled, and ranks do not settle after equally many
steps: one that reads its loss waits for the device in every step, others run ahead of theirs and
need a step more until they repeat. Group members would then meet each other in different steps.

The stream ``prologue, body, body, …`` is the same program wherever behind that place the border is
drawn. So bodies move into the shorter prologues, as many as it takes until all members of each
group have communicated there equally often: the n-th use of a channel meets the n-th of every other
side. Nothing is cut, because the first steps differ from steady ones and a live rank really makes
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prismscale.graph.channels import ChannelKey, ClassChannels
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import RankTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class _Uses:
    """How often one trace comes to a channel."""

    trace: int
    prologue: int
    body: int


def aligned(graph: JobGraph) -> JobGraph:
    """``graph`` with prologues that end at the same step, or itself where they do already.

    Where no number of moved bodies makes members agree, nothing is moved: the program's own
    mismatch is left for :func:`prismscale.graph.verify.verify` to tell.
    """
    # Each trace once: classes that share one must go on sharing it.
    traces = list({id(c.trace): c.trace for c in graph.classes}.values())
    moved = _bodies_to_move(len(traces), _channel_uses(graph, traces))
    if not any(moved):
        return graph
    longer = {id(t): unrolled(t, n) for t, n in zip(traces, moved, strict=True)}
    return replace(
        graph, classes=tuple(replace(c, trace=longer[id(c.trace)]) for c in graph.classes)
    )


def unrolled(trace: RankTrace, bodies: int) -> RankTrace:
    """The same program with ``bodies`` more steps in its prologue, which last as sampled ones."""
    if bodies == 0:
        return trace
    n = trace.n_prologue
    # The stored node of every new one. Distances back stay what they are, because the stream does.
    order = np.concatenate([np.arange(n), np.tile(np.arange(n, trace.n_nodes), bodies + 1)])
    counts = np.diff(trace.pred_start_N1)[order]
    start_N1 = np.concatenate([[0], np.cumsum(counts)])
    entries = np.arange(start_N1[-1]) + np.repeat(
        trace.pred_start_N1[order] - start_N1[:-1], counts
    )
    samples = [trace.body_ns_SB[k % trace.n_samples] for k in range(bodies)]
    calls = trace.facts.calls_in_prologue + bodies * trace.facts.calls_per_step
    return replace(
        trace,
        n_prologue=n + bodies * trace.n_body,
        **trace.columns_of(order),
        pred_start_N1=start_N1.astype(np.int32),
        pred_distance_P=trace.pred_distance_P[entries],
        prologue_ns=np.concatenate([trace.prologue_ns, *samples]),
        facts=replace(trace.facts, calls_in_prologue=calls),
    )


def _channel_uses(graph: JobGraph, traces: Sequence[RankTrace]) -> list[list[_Uses]]:
    """By channel: how often each class comes to it."""
    number = {id(trace): n for n, trace in enumerate(traces)}
    uses_by_channel: dict[ChannelKey, list[_Uses]] = {}
    for rank_class in graph.classes:
        channels = ClassChannels(graph, rank_class)
        counts: dict[ChannelKey, list[int]] = {}
        for node, prologue, body in _spellings(rank_class.trace):
            count = counts.setdefault(channels.of(node), [0, 0])
            count[0] += prologue
            count[1] += body
        for key, (prologue, body) in counts.items():
            uses = _Uses(trace=number[id(rank_class.trace)], prologue=prologue, body=body)
            uses_by_channel.setdefault(key, []).append(uses)
    return list(uses_by_channel.values())


def _spellings(trace: RankTrace) -> Iterator[tuple[int, int, int]]:
    """For each way in which a trace names a channel: one such node, uses in prologue and body."""
    nodes = np.flatnonzero(trace.kind_N != NodeKind.COMPUTE)
    names = np.stack(
        [c[nodes].astype(np.int64) for c in (trace.kind_N, trace.group_index_N, trace.peer_N)]
    )
    _, first, which = np.unique(names, axis=1, return_index=True, return_inverse=True)
    # NumPy's versions differ in the shape of the inverse.
    which = which.reshape(-1)
    uses = np.bincount(which)
    prologue = np.bincount(which[nodes < trace.n_prologue], minlength=len(uses))
    return zip(nodes[first].tolist(), prologue.tolist(), (uses - prologue).tolist(), strict=True)


def _bodies_to_move(n_traces: int, uses_by_channel: Sequence[Sequence[_Uses]]) -> list[int]:
    """Fewest bodies of each trace that its prologue must take in; none where that cannot help."""
    nothing = [0] * n_traces
    moved = list(nothing)
    repeated = [uses for uses in uses_by_channel if uses[0].body]
    # What one trace takes in may oblige another, as lengths of paths do: what still changes after
    # that many rounds never ends.
    for _ in range(n_traces + 1):
        before = list(moved)
        for uses in repeated:
            level = max(u.prologue + moved[u.trace] * u.body for u in uses)
            for u in uses:
                lacking = level - u.prologue - moved[u.trace] * u.body
                # Sides that use a channel unequally often in a step never agree, and no part of a
                # step moves.
                if u.body != uses[0].body or lacking % u.body:
                    return nothing
                moved[u.trace] += lacking // u.body
        if moved == before:
            return moved
    return nothing
