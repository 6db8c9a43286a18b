"""Launch paths: nodes for the host's way to a stream's work, beside the work on the same lane.

A null device records two nodes for a stretch of work on a stream. The work node lasts as long as
the device needs. The *launch path* begins with the host's launches and may end later if kernels are
short. Code that shows or exports one thing at a time on a stream treats the two as one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.node import NodeKind
from prismscale.graph.trace import HOST, RankTrace

LAUNCH_SUFFIX = f", {HOST}"
"""Suffix of the label of a launch path, and of the label of the host's own work."""


def is_launch_path_N(trace: RankTrace) -> NDArray[np.bool_]:
    """Return True for nodes that are launch paths."""
    suffixed = np.array([label.endswith(LAUNCH_SUFFIX) for label in trace.labels])
    on_host = np.array([lane == HOST for lane in trace.lanes])
    found: NDArray[np.bool_] = (
        suffixed[trace.label_N] & ~on_host[trace.lane_N] & (trace.kind_N == NodeKind.COMPUTE)
    )
    return found


def work_beside_N(trace: RankTrace) -> NDArray[np.int64]:
    """Map each launch path to its work, and every other node to itself.

    The work is the node just before the launch path, on the same lane. A launch path without such a
    node maps to itself.
    """
    own = np.arange(trace.n_nodes)
    before = own - 1
    is_beside = is_launch_path_N(trace) & (own > 0) & (own != trace.n_prologue)
    is_beside &= (trace.lane_N[before] == trace.lane_N) & ~is_launch_path_N(trace)[before]
    is_beside &= trace.kind_N[before] == NodeKind.COMPUTE
    return np.where(is_beside, before, own)
