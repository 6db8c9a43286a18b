"""Which kernels the durations of a null run are made of.

A node of a null run stands for many kernels of several kinds. How unsteady it is follows from
theirs: what a slow device does to it is their mean, weighted by time; what chance does to it
shrinks with their number.

Array axes: ``B`` body nodes, ``K`` kinds of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.launch_log import LaunchLog, NodePath, costs, kinds, recost, sums_over_nodes
from prismscale.durations.recosting import Recosting
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.trace import RankTrace

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """Of the body of one trace."""

    kinds: tuple[str, ...]
    share_BK: Floats
    """Time of the kernels of each kind over the node's duration. They add up to 1 where a stream
    works, to less on the way over the host, to 0 for the host's own work and for communication."""
    square_BK: Floats
    """Sum of the squares of each kernel's share: kernels that vary on their own by a CV each make
    the node vary by that times the root of this. 0 but for a stream's work: the way over the host
    holds the same kernels once more."""


def compositions(graph: JobGraph, recosting: Recosting) -> tuple[Composition, ...]:
    """The composition of every class of a null run.

    Args:
        graph: of a null run.
        recosting: how its computation is costed.

    Raises:
        UsageError: logs that are not there.
        FormatError: damaged files.
    """
    known: dict[int, Composition] = {}
    for rank_class in graph.classes:
        trace = rank_class.trace
        if id(trace) not in known:
            # Captured members of a class launch the same kernels; the first one speaks for all.
            known[id(trace)] = _composition(next(recosting.logs(trace)), trace, recosting)
    return tuple(known[id(c.trace)] for c in graph.classes)


def _composition(log: LaunchLog, trace: RankTrace, recosting: Recosting) -> Composition:
    model, recomputes = recosting.model, recosting.recomputes
    device_ns_S, host_ns_S = costs(log, model)
    names, kind_S = np.unique(kinds(log, model), return_inverse=True)
    is_kind_KS = kind_S == np.arange(len(names))[:, np.newaxis]
    ns_N = np.maximum(recost(log, device_ns_S, host_ns_S, recomputes=recomputes), 1)
    time_NK, square_NK = (
        sums_over_nodes(log, is_kind_KS * ns_S, recomputes=recomputes).T
        for ns_S in (device_ns_S, np.square(device_ns_S, dtype=np.float64))
    )
    # What a way over the host takes may end before the last of its kernels would.
    total_N = np.maximum(time_NK.sum(axis=1), ns_N)[:, np.newaxis]
    works_N = (log.path_N == NodePath.WORK)[:, np.newaxis]
    share_BK, square_BK = (np.zeros((trace.n_body, len(names))) for _ in range(2))
    share_BK[log.node_N] = time_NK / total_N
    square_BK[log.node_N] = np.where(works_N, square_NK / np.square(total_N), 0.0)
    return Composition(kinds=tuple(names.tolist()), share_BK=share_BK, square_BK=square_BK)
