"""The host's way to a stream's work: a node beside the work itself, on the same lane.

A null device has two nodes for a stretch of work on a stream: what the device takes, and the way
over the host, whose end may come later where kernels are short. Whoever shows or exports one thing
at a time on a stream takes them as one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.node import NodeKind
from prismscale.graph.trace import HOST, RankTrace

LAUNCH_SUFFIX = f", {HOST}"
"""Of the label of a launch path, and of the host's own work."""


def is_launch_path_N(trace: RankTrace) -> NDArray[np.bool_]:
    """Which nodes are launch paths."""
    suffixed = np.array([label.endswith(LAUNCH_SUFFIX) for label in trace.labels])
    on_host = np.array([lane == HOST for lane in trace.lanes])
    found: NDArray[np.bool_] = (
        suffixed[trace.label_N] & ~on_host[trace.lane_N] & (trace.kind_N == NodeKind.COMPUTE)
    )
    return found


def work_beside_N(trace: RankTrace) -> NDArray[np.int64]:
    """For each node the work whose launch path it is, which comes just before it on its lane; for
    all others, and launch paths without work, the node itself."""
    own = np.arange(trace.n_nodes)
    before = own - 1
    is_beside = is_launch_path_N(trace) & (own > 0) & (own != trace.n_prologue)
    is_beside &= (trace.lane_N[before] == trace.lane_N) & ~is_launch_path_N(trace)[before]
    is_beside &= trace.kind_N[before] == NodeKind.COMPUTE
    return np.where(is_beside, before, own)
