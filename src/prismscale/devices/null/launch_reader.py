"""The launches of this process, as the extension noted them since the spans began."""

from __future__ import annotations

import ctypes

import numpy as np

from prismscale.cost.launch_log import HOST_ONLY, LaunchLog
from prismscale.devices.null.bindings import LAUNCH_ROW, NODE_ROW


def launch_log(library: ctypes.PyDLL) -> LaunchLog:
    """What is known now, whose nodes are positions in the stream of the capture."""
    n_launches, n_nodes = ctypes.c_int64(), ctypes.c_int64()
    library.ps_log_sizes(ctypes.byref(n_launches), ctypes.byref(n_nodes))
    rows = np.empty(n_launches.value, dtype=LAUNCH_ROW)
    nodes = np.empty(n_nodes.value, dtype=NODE_ROW)
    library.ps_log_copy(rows.ctypes.data, nodes.ctypes.data)
    nodes = nodes[np.argsort(nodes["position"], kind="stable")]
    host_only = rows["lane"] == HOST_ONLY
    count = library.ps_signature_count()
    return LaunchLog(
        signatures=tuple(library.ps_signature(s).decode() for s in range(count)),
        signature_E=np.where(host_only, HOST_ONLY, rows["signature"]).astype(np.int32),
        lane_E=rows["lane"].astype(np.int32),
        # Where there is no signature, the extension has the nanoseconds in its place.
        host_only_ns_E=np.where(host_only, rows["signature"], 0).astype(np.int64),
        node_N=nodes["position"].copy(),
        path_N=nodes["path"].astype(np.int32),
        lane_N=nodes["lane"].astype(np.int32),
        since_N=nodes["since"].copy(),
        first_N=nodes["first"].copy(),
        stop_N=nodes["stop"].copy(),
    )
