"""The kinds of kernels that the durations of a null run consist of.

A node of a null run stands for many kernels of several kinds, and its variability follows from
theirs. A slow device slows the node by the mean over its kernels, weighted by time. Random
variation of single kernels averages out with their number.

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
    """Shares of kernel kinds in the body nodes of one trace."""

    kinds: tuple[str, ...]
    share_BK: Floats
    """Time of the kernels of each kind over the node's duration. The shares of a node add up to 1
    for work of a stream, to less for a launch path, to 0 for host work and communication."""
    square_BK: Floats
    """Sum of the squares of each kernel's share of the node. If kernels vary independently, each by
    the same CV, the node varies by that CV times the square root of this sum. It is 0 except for
    work of a stream, because a launch path holds the same kernels once more."""


def compositions(graph: JobGraph, recosting: Recosting) -> tuple[Composition, ...]:
    """Return the composition of every class of a null run.

    Args:
        graph: the null run's graph.
        recosting: costs its computation.

    Raises:
        UsageError: a log is missing.
        FormatError: a file is damaged.
    """
    known: dict[int, Composition] = {}
    for rank_class in graph.classes:
        trace = rank_class.trace
        if id(trace) not in known:
            # Captured members of a class launch the same kernels, so the first log is enough.
            known[id(trace)] = _composition(next(recosting.logs(trace)), trace, recosting)
    return tuple(known[id(c.trace)] for c in graph.classes)


def _composition(log: LaunchLog, trace: RankTrace, recosting: Recosting) -> Composition:
    if not log.signatures:
        # Steps in which a rank only waits or works on its host consist of no kernels.
        none_BK = np.zeros((trace.n_body, 0))
        return Composition(kinds=(), share_BK=none_BK, square_BK=none_BK)
    model, recomputes = recosting.model, recosting.recomputes
    device_ns_S, host_ns_S = costs(log, model)
    names, kind_S = np.unique(kinds(log, model), return_inverse=True)
    is_kind_KS = kind_S == np.arange(len(names))[:, np.newaxis]
    ns_N = np.maximum(recost(log, device_ns_S, host_ns_S, recomputes=recomputes), 1)
    time_NK, square_NK = (
        sums_over_nodes(log, is_kind_KS * ns_S, recomputes=recomputes).T
        for ns_S in (device_ns_S, np.square(device_ns_S, dtype=np.float64))
    )
    # A launch path may be shorter than the sum of its kernels.
    total_N = np.maximum(time_NK.sum(axis=1), ns_N)[:, np.newaxis]
    works_N = (log.path_N == NodePath.WORK)[:, np.newaxis]
    share_BK, square_BK = (np.zeros((trace.n_body, len(names))) for _ in range(2))
    share_BK[log.node_N] = time_NK / total_N
    square_BK[log.node_N] = np.where(works_N, square_NK / np.square(total_N), 0.0)
    return Composition(kinds=tuple(names.tolist()), share_BK=share_BK, square_BK=square_BK)
