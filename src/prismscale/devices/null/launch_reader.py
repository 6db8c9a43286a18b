"""Reader of the launches that the extension has recorded in this process since the spans began."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from prismscale.cost.launch_log import STATED, LaunchLog, RecomputedPart
from prismscale.devices.null.bindings import LAUNCH_ROW, NODE_ROW
from prismscale.devices.null.device import NullDevice


class RecomputedParts:
    """Records the launches and nodes between which a backward pass recomputes activations.

    It is a :class:`~prismscale.emulation.step_detection.RecomputationListener`.
    """

    def __init__(
        self, library: ctypes.PyDLL, device: NullDevice, found: list[RecomputedPart]
    ) -> None:
        """``found``: list to which the parts are appended."""
        self._library, self._device, self._found = library, device, found
        self._began = (0, 0)

    def recomputation_begins(self) -> None:
        """Note where a recomputed part begins."""
        self._began = self._reached()

    def recomputation_ended(self) -> None:
        """Note where it ends, and append the part."""
        (first_entry, first_node), (stop_entry, stop_node) = self._began, self._reached()
        self._found.append(
            RecomputedPart(
                first_entry=first_entry,
                stop_entry=stop_entry,
                first_node=first_node,
                stop_node=stop_node,
            )
        )

    def _reached(self) -> tuple[int, int]:
        """Return the numbers of launches and of nodes so far."""
        return _log_sizes(self._library)[0], self._device.n_nodes()


def _log_sizes(library: ctypes.PyDLL) -> tuple[int, int]:
    n_launches, n_nodes = ctypes.c_int64(), ctypes.c_int64()
    library.ps_log_sizes(ctypes.byref(n_launches), ctypes.byref(n_nodes))
    return n_launches.value, n_nodes.value


def launch_log(library: ctypes.PyDLL, recomputed: Sequence[RecomputedPart] = ()) -> LaunchLog:
    """Return the log so far. Its nodes are positions in the capture's node stream."""
    n_launches, n_nodes = _log_sizes(library)
    rows = np.empty(n_launches, dtype=LAUNCH_ROW)
    nodes = np.empty(n_nodes, dtype=NODE_ROW)
    library.ps_log_copy(rows.ctypes.data, nodes.ctypes.data)
    nodes = nodes[np.argsort(nodes["position"], kind="stable")]
    is_stated = rows["is_stated"] != 0
    count = library.ps_signature_count()
    return LaunchLog(
        signatures=tuple(library.ps_signature(s).decode() for s in range(count)),
        signature_E=np.where(is_stated, STATED, rows["signature"]).astype(np.int32),
        lane_E=rows["lane"].astype(np.int32),
        # A stated row has nanoseconds in place of a signature.
        stated_ns_E=np.where(is_stated, rows["signature"], 0).astype(np.int64),
        node_N=nodes["position"].copy(),
        path_N=nodes["path"].astype(np.int32),
        lane_N=nodes["lane"].astype(np.int32),
        since_N=nodes["since"].copy(),
        first_N=nodes["first"].copy(),
        stop_N=nodes["stop"].copy(),
        recomputed=tuple(recomputed),
    )
