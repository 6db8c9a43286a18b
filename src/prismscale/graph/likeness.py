"""Tells whether two ranks run the same program.

[Note: waits for room] A device's launch queue has a limited depth. A host that is further ahead
waits for an old launch to end. Which launch that is depends on how many kernels came in between: a
rank whose shard of the optimizer holds two parameters more waits one kernel earlier in the same
program. Such edges belong to a rank's timing. They do not make its program a different one.

[Note: before the steps] A rank that compiles reads its caches, and data-loading threads start at
times of their own. So until steps repeat, the points at which the host's work is cut, and the order
in which a stream receives it, differ from run to run. The steps do not depend on this.
Communications before the steps do count.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.launch_paths import is_launch_path_N, work_beside_N
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import HOST, PROGRAM_COLUMNS, RankTrace

_LATEST = 2
"""Most nodes of a stream that count as its latest work: the work and its launch path."""


def program_fingerprint(trace: RankTrace) -> str:
    """Hash the program alone: equal ⇒ ranks may share a class.

    If time is measured, this is :meth:`RankTrace.fingerprint`. If time is modelled, it leaves out
    waits for room and the computation before the steps: see [Note: waits for room],
    [Note: before the steps].
    """
    if not trace.facts.modelled:
        return trace.fingerprint()
    waits_P = waits_for_room(trace)
    start_N1 = trace.pred_start_N1 - np.concatenate(([0], np.cumsum(waits_P)))[trace.pred_start_N1]
    distance_P = trace.pred_distance_P[~waits_P]
    n = trace.n_prologue
    digest = hashlib.sha256()
    digest.update(repr(([len(g.ranks) for g in trace.groups], trace.lanes)).encode())
    is_told_N = trace.kind_N != NodeKind.COMPUTE
    is_told_N[n:] = True
    for name in PROGRAM_COLUMNS:
        digest.update(getattr(trace, name)[is_told_N].tobytes())
    digest.update((start_N1[n:] - start_N1[n]).astype(np.int64).tobytes())
    digest.update(distance_P[start_N1[n] :].tobytes())
    return digest.hexdigest()


def waits_for_room(trace: RankTrace) -> NDArray[np.bool_]:
    """Return True for predecessor entries (P) by which the host waits for room in a launch queue.

    When the program itself waits on the host, it waits for the latest work of a stream. An edge
    from older work to a host node or a launch path is therefore a wait for room.
    """
    n_nodes = len(trace.kind_N)
    found = np.zeros(len(trace.pred_distance_P), dtype=bool)
    # If time is measured, no launch queue is modelled: all edges are the program's own.
    if not trace.facts.modelled or HOST not in trace.lanes:
        return found
    host = trace.lanes.index(HOST)
    node_P = np.repeat(np.arange(n_nodes), np.diff(trace.pred_start_N1))
    place_P, laps_P = _places(trace, node_P)
    lane_P = trace.lane_N[place_P]
    is_led_by_host_N = (trace.lane_N == host) | is_launch_path_N(trace)
    is_computation_N = trace.kind_N == NodeKind.COMPUTE
    candidates = np.flatnonzero(
        is_led_by_host_N[node_P]
        & (lane_P != host)
        & is_computation_N[place_P]
        & is_computation_N[node_P]
    )
    # A launch path comes after its own work in the stream but does not wait for it.
    begins_P = work_beside_N(trace)[node_P]
    for lane in np.unique(lane_P[candidates]).tolist():
        edges = candidates[lane_P[candidates] == lane]
        on_lane = np.flatnonzero(trace.lane_N == lane)
        in_body = int(np.sum(on_lane >= trace.n_prologue))
        until = np.searchsorted(on_lane, begins_P[edges]) + laps_P[edges] * in_body
        since = np.searchsorted(on_lane, place_P[edges], side="right")
        found[edges] = until - since >= _LATEST
    return found


def _places(trace: RankTrace, node_P: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Return each predecessor's stored node, and how many bodies back it lies.

    An edge that leaves the body at its start leads into the body before, which has the same nodes.
    """
    pred_P = node_P - trace.pred_distance_P
    n_body = max(1, len(trace.kind_N) - trace.n_prologue)
    is_before_P = (node_P >= trace.n_prologue) & (pred_P < trace.n_prologue)
    laps_P = np.where(is_before_P, -((pred_P - trace.n_prologue) // n_body), 0)
    return pred_P + laps_P * n_body, laps_P
