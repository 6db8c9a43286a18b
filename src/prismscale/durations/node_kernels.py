"""The kernels of each node that a null device recorded, taken from the launch logs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from prismscale.cost.kernel_signature import FIELD
from prismscale.cost.launch_log import REPLAYED, STATED, LaunchLog, NodePath, costs
from prismscale.durations.recosting import Recosting
from prismscale.graph.trace import RankTrace

NamedKernel = tuple[str, int]
"""A kernel's operator (``aten::mm``) and its duration in ns."""


@dataclass(frozen=True, kw_only=True)
class NodeKernels:
    """Looks up the kernels of the nodes of a trace's body."""

    recosting: Recosting
    _known: dict[int, dict[int, tuple[NamedKernel, ...]]] = field(default_factory=dict)

    def of(self, trace: RankTrace, node: int) -> tuple[NamedKernel, ...]:
        """Return the kernels of body node ``node``, in launch order.

        Communications, host work and launch paths have none.
        """
        known = self._known.get(id(trace))
        if known is None:
            log = next(iter(self.recosting.logs(trace)))
            known = self._known[id(trace)] = dict(self._kernels(log))
        return known.get(node, ())

    def _kernels(self, log: LaunchLog) -> list[tuple[int, tuple[NamedKernel, ...]]]:
        device_ns_S, _ = costs(log, self.recosting.model)
        names = [
            signature.removeprefix(REPLAYED).partition(FIELD)[0] for signature in log.signatures
        ]
        found = []
        for n in np.flatnonzero(log.path_N == NodePath.WORK).tolist():
            entries = np.arange(log.first_N[n], log.stop_N[n])
            own = log.signature_E[entries[log.lane_E[entries] == log.lane_N[n]]]
            kernels = tuple(
                (names[s], int(device_ns_S[s]))
                for s in own[own != STATED].tolist()
                if device_ns_S[s]
            )
            found.append((int(log.node_N[n]), kernels))
        return found
