"""Extends prologues so that the bodies of all traces of a job begin at the same step.

A body begins where the program of its own rank reached its steady state, and ranks do not get there
after equally many steps. A rank that reads its loss waits for the device in every step; others run
ahead of their device and need one step more until their steps repeat. Without alignment, group
members would meet each other in different steps.

The stream ``prologue, body, body, …`` stays the same program if the border moves to a later step.
So bodies move into the shorter prologues, as many as it takes until all members of each group have
communicated equally often in the prologue: the n-th use of a channel meets the n-th use by every
other side. Prologues are never shortened, because the first steps differ from steady ones and a
live rank really runs them.
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
    """How often one trace uses a channel, in its prologue and in its body."""

    trace: int
    prologue: int
    body: int


def aligned(graph: JobGraph) -> JobGraph:
    """Return ``graph`` with prologues that end at the same step, or itself if they already do.

    If no number of moved bodies makes members agree, nothing is moved: it is left to
    :func:`prismscale.graph.verify.verify` to report the program's own mismatch.
    """
    # Each trace once, because classes that share a trace must go on sharing it.
    traces = list({id(c.trace): c.trace for c in graph.classes}.values())
    moved = _bodies_to_move(len(traces), _channel_uses(graph, traces))
    if not any(moved):
        return graph
    longer = {id(t): unrolled(t, n) for t, n in zip(traces, moved, strict=True)}
    return replace(
        graph, classes=tuple(replace(c, trace=longer[id(c.trace)]) for c in graph.classes)
    )


def unrolled(trace: RankTrace, bodies: int) -> RankTrace:
    """Return the same program with ``bodies`` more steps, of sampled durations, in its prologue."""
    if bodies == 0:
        return trace
    n = trace.n_prologue
    # Stored node of each new node. Distances back do not change, because the stream does not.
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
    """Return, for each channel, how often each class uses it."""
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
    """Iterate over the distinct (kind, group index, peer) of a trace's communications.

    Each entry holds one such node, the number of uses in the prologue, and that in the body.
    """
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
    """Return the fewest bodies to move into each prologue; all 0 if no number makes sides agree."""
    nothing = [0] * n_traces
    moved = list(nothing)
    repeated = [uses for uses in uses_by_channel if uses[0].body]
    # Bodies moved in one trace may require more in another, as in a longest-path search. If the
    # numbers still change after one round more than there are traces, they never settle.
    for _ in range(n_traces + 1):
        before = list(moved)
        for uses in repeated:
            level = max(u.prologue + moved[u.trace] * u.body for u in uses)
            for u in uses:
                lacking = level - u.prologue - moved[u.trace] * u.body
                # Only whole steps move: sides that use a channel unequally often in one never
                # agree.
                if u.body != uses[0].body or lacking % u.body:
                    return nothing
                moved[u.trace] += lacking // u.body
        if moved == before:
            return moved
    return nothing
