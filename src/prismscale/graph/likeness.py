"""Whether two ranks run one program.

[Note: waits for room] A device takes so many launches ahead and no more; a host that is further
ahead waits for an old one to end. Which one depends on how many kernels came between: a rank whose
shard of the optimizer holds two parameters more waits a kernel earlier, in the same program. Such
edges are of a rank's times. They are no reason to tell its program from another's.

[Note: before the steps] A rank that compiles reads its caches, and threads that load data start
when they do: where the host's work is cut, and in what order a stream gets it, differs from run to
run until steps repeat. No step comes of it. Communications before the steps do count.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.launch_paths import is_launch_path_N, work_beside_N
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import HOST, PROGRAM_COLUMNS, RankTrace

_LATEST = 2
"""Nodes of a stream between two communications: its work, and the host's path beside it."""


def program_fingerprint(trace: RankTrace) -> str:
    """Hash of the program alone: equal ⇒ ranks may share a class.

    :meth:`RankTrace.fingerprint` without waits for room and, where time is modelled, without what
    a rank computes before its steps: see [Note: waits for room], [Note: before the steps].
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
    """Which predecessor entries are waits of the host for room in a launch queue; shape (P).

    What a program itself waits for on the host is the latest work of a stream. An edge from older
    work to a node of the host, or to a launch path, is a wait for room.
    """
    n_nodes = len(trace.kind_N)
    found = np.zeros(len(trace.pred_distance_P), dtype=bool)
    # Where time is measured no queue is modelled: all edges are the program's own.
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
    # A launch path comes after its own work, which is nothing that it waits for.
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
    """Of every predecessor its place among the nodes, and how many bodies it lies back: a body
    looks back into the one before, which is the same."""
    pred_P = node_P - trace.pred_distance_P
    n_body = max(1, len(trace.kind_N) - trace.n_prologue)
    is_before_P = (node_P >= trace.n_prologue) & (pred_P < trace.n_prologue)
    laps_P = np.where(is_before_P, -((pred_P - trace.n_prologue) // n_body), 0)
    return pred_P + laps_P * n_body, laps_P
