"""Finds how far every class of a job comes before no class can go on.

The engine re-times jobs that end. This walk needs no times: a node is done when its predecessors
are done, and a communication when all its members have reached it and make the same call. Nodes
that do not depend on a blocked one go on, as a host issues ahead of its device. So calls that are
queued behind the hang are found, too.

Array axis: ``N`` positions of a class's stream ``prologue, body, body, …``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prismscale.formats.flight_recorder.rank_calls import CallState
from prismscale.graph.channels import ChannelKey, ClassChannels, classes_of
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import HOST, RankTrace
from prismscale.graph.verify import Use

STEPS_BEYOND = 2
"""Number of steps to walk after those in the longest prologue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassStanding:
    """The communications that a class has called, in order (axis ``C``)."""

    node_C: NDArray[np.int64]
    """Stored nodes of its trace."""
    state_C: NDArray[np.int8]
    """A :class:`CallState`."""


@dataclass(kw_only=True, slots=True)
class _ClassWalk:
    """Progress of one class in the walk."""

    rank_class: RankClass
    node_N: list[int]
    waits_N: list[int]
    """Number of predecessors that are not done."""
    first_follower_N1: list[int]
    followers: list[int]
    meeting_N: list[tuple[ChannelKey, int] | None]
    """For communications: the channel, and the running number of its use."""
    stop: int
    """Position at which the program ends, or at which its rank hangs."""
    done_N: list[bool] = field(default_factory=list)


def stand_still(graph: JobGraph, hang: Mapping[int, int]) -> list[ClassStanding]:
    """Return where every class of ``graph`` stands in the end.

    Args:
        graph: may be illegal. Each rank in ``hang`` has a class of its own.
        hang: by rank, the steady step (from 0) at the beginning of which it stops.
    """
    steps = _steps(graph, hang)
    walks = [
        _walk(graph, rank_class, n, hang)
        for rank_class, n in zip(graph.classes, steps, strict=True)
    ]
    ready = deque(
        (index, x)
        for index, walk in enumerate(walks)
        for x in range(walk.stop)
        if walk.waits_N[x] == 0
    )
    come: dict[tuple[ChannelKey, int], dict[int, int]] = {}
    expected: dict[ChannelKey, int] = {}
    while ready:
        index, x = ready.popleft()
        meeting = walks[index].meeting_N[x]
        if meeting is None:
            _finish(walks, index, x, ready)
            continue
        sides = come.setdefault(meeting, {})
        sides[index] = x
        key = meeting[0]
        if key not in expected:
            expected[key] = len(classes_of(graph, key))
        if len(sides) == expected[key] and _agree(walks, sides):
            for side, position in sides.items():
                _finish(walks, side, position, ready)
    return [_standing(walk) for walk in walks]


def _steps(graph: JobGraph, hang: Mapping[int, int]) -> list[int]:
    """Return the number of bodies for each class, so that all classes reach the same step."""
    held = [_held(c.trace) for c in graph.classes]
    total = max(held) + STEPS_BEYOND + max(hang.values(), default=0)
    return [total - n for n in held]


def _held(trace: RankTrace) -> int:
    """Return the number of steps in a prologue."""
    return trace.facts.calls_in_prologue // trace.facts.calls_per_step


def _walk(
    graph: JobGraph, rank_class: RankClass, steps: int, hang: Mapping[int, int]
) -> _ClassWalk:
    trace = rank_class.trace
    n = trace.n_prologue + steps * trace.n_body
    body = np.arange(trace.n_prologue, trace.n_nodes)
    node_N = np.concatenate([np.arange(trace.n_prologue), np.tile(body, steps)])
    counts = np.diff(trace.pred_start_N1)[node_N]
    ends = np.cumsum(counts)
    entries = np.arange(ends[-1] if n else 0) + np.repeat(
        trace.pred_start_N1[node_N] - (ends - counts), counts
    )
    followers = np.repeat(np.arange(n), counts)
    sources = followers - trace.pred_distance_P[entries]
    inside = sources >= 0
    followers, sources = followers[inside], sources[inside]
    order = np.argsort(sources, kind="stable")
    stop = n
    for rank in set(rank_class.members_M.tolist()) & hang.keys():
        stop = min(stop, trace.n_prologue + hang[rank] * trace.n_body)
    return _ClassWalk(
        rank_class=rank_class,
        node_N=node_N.tolist(),
        waits_N=np.bincount(followers, minlength=n).tolist(),
        first_follower_N1=np.searchsorted(sources[order], np.arange(n + 1)).tolist(),
        followers=followers[order].tolist(),
        meeting_N=_meetings(graph, rank_class, node_N),
        stop=stop,
        done_N=[False] * n,
    )


def _meetings(
    graph: JobGraph, rank_class: RankClass, node_N: NDArray[np.int64]
) -> list[tuple[ChannelKey, int] | None]:
    channels = ClassChannels(graph, rank_class)
    computes = (rank_class.trace.kind_N == NodeKind.COMPUTE).tolist()
    uses: dict[ChannelKey, int] = {}
    found: list[tuple[ChannelKey, int] | None] = []
    for node in node_N.tolist():
        if computes[node]:
            found.append(None)
            continue
        key = channels.of(node)
        uses[key] = uses.get(key, 0) + 1
        found.append((key, uses[key]))
    return found


def _finish(walks: list[_ClassWalk], index: int, x: int, ready: deque[tuple[int, int]]) -> None:
    walk = walks[index]
    walk.done_N[x] = True
    for i in range(walk.first_follower_N1[x], walk.first_follower_N1[x + 1]):
        follower = walk.followers[i]
        walk.waits_N[follower] -= 1
        if walk.waits_N[follower] == 0 and follower < walk.stop:
            ready.append((index, follower))


def _agree(walks: list[_ClassWalk], sides: Mapping[int, int]) -> bool:
    uses = (
        Use(rank_class=walks[index].rank_class, node=walks[index].node_N[x])
        for index, x in sides.items()
    )
    return len({use.signature() for use in uses}) == 1


def _standing(walk: _ClassWalk) -> ClassStanding:
    """Return what the host has called: everything before its first own node that is not done."""
    trace = walk.rank_class.trace
    host = trace.lanes.index(HOST) if HOST in trace.lanes else -1
    reached = walk.stop
    for x in range(walk.stop):
        if not walk.done_N[x] and trace.lane_N[walk.node_N[x]] == host:
            reached = x
            break
    called = [
        x
        for x in range(reached)
        if walk.meeting_N[x] is not None
        and trace.op_N[walk.node_N[x]] != CollectiveOp.SYMM_MEM_BARRIER
    ]
    states = [
        CallState.COMPLETED
        if walk.done_N[x]
        else CallState.SCHEDULED
        if walk.waits_N[x]
        else CallState.STARTED
        for x in called
    ]
    return ClassStanding(
        node_C=np.array([walk.node_N[x] for x in called], dtype=np.int64),
        state_C=np.array(states, dtype=np.int8),
    )
