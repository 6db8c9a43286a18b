"""Ranks that meet after every few kernels are drawn as one.

Devices of a tensor-parallel group's members differ in speed, but no member gets ahead: the next
computation needs a collective of the group. One member of a smaller graph stands for the group and
takes, for each node, the duration of its slowest rank. This is exact for a node that the group's
collective follows. Where several nodes follow each other without one (an optimizer), the sum of the
slowest durations is more than the slowest sum, so step times are an upper bound
(``bench/variation.py`` says by how much).
"""

from __future__ import annotations

import numpy as np

from prismscale.durations.composition import Composition
from prismscale.errors import PrismscaleError
from prismscale.forecast.draws.lockstep import FusedGraph, fuse_sets
from prismscale.forecast.draws.quotient import group_indices_within_nodes, messages_stay
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import RankTrace

LOCKSTEP_SHARE = 0.5
"""Share of computation that a collective of the group must follow. With less, its ranks are not
drawn as one."""


def lockstep_sets(
    graph: JobGraph, compositions: tuple[Composition, ...], devices_per_node: int
) -> FusedGraph | None:
    """Return the graph fused along the largest lockstep groups within one node.

    None where there are no such groups.
    """
    for group_index in group_indices_within_nodes(graph, devices_per_node):
        shares = [
            _share_followed(c.trace, compositions[c.index], group_index) for c in graph.classes
        ]
        if min(shares) < LOCKSTEP_SHARE:
            continue
        whole = [tuple((b,) for b in range(c.trace.n_body)) for c in graph.classes]
        try:
            fused = fuse_sets(graph, group_index, whole)
        except PrismscaleError:
            # The groups do not fit the job's other groups.
            continue
        if messages_stay(fused):
            return fused
    return None


def _share_followed(trace: RankTrace, own: Composition, group_index: int) -> float:
    """Return the share of the streams' work that a collective of the group waits for."""
    first, n = trace.n_prologue, trace.n_body
    time_B = np.where(own.square_BK.any(axis=1), trace.body_ns_SB[0], 0)
    is_met_B = np.zeros(n, dtype=bool)
    collective_B = trace.kind_N[first:] == NodeKind.COLLECTIVE
    for b in np.flatnonzero(collective_B & (trace.group_index_N[first:] == group_index)).tolist():
        is_met_B[(b - trace.predecessors(first + b)) % n] = True
    total = int(time_B.sum())
    return float(time_B[is_met_B].sum() / total) if total else 0.0
