"""The kernels of each node that a null device recorded, taken from the launch logs.

Axes: ``S`` signatures of a log.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from prismscale.cost.kernel import KernelModel
from prismscale.cost.kernel_signature import FIELD
from prismscale.cost.launch_log import REPLAYED, STATED, LaunchLog, NodePath, costs, kinds
from prismscale.durations.recosting import Recosting
from prismscale.graph.trace import RankTrace

NamedKernel = tuple[str, int]
"""A kernel's operator (``aten::mm``) and its duration in ns."""


@dataclass(frozen=True, kw_only=True)
class NodeKernels:
    """Looks up the kernels of the nodes of a trace's body."""

    recosting: Recosting
    _known: dict[int, _Launches] = field(default_factory=dict)

    def of(self, trace: RankTrace, node: int) -> tuple[NamedKernel, ...]:
        """Return the kernels of body node ``node``, in launch order.

        Communications, host work and launch paths have none.
        """
        known = self._launches(trace)
        return tuple((known.operators[s], known.device_ns[s]) for s in known.of(node))

    def share_of(self, trace: RankTrace, node: int, kinds: Collection[str]) -> float | None:
        """Return the fraction of the time of a body node's kernels that is of some kinds.

        None for a node that has no kernels, as in :meth:`of`.
        """
        known = self._launches(trace)
        total = sum(known.device_ns[s] for s in known.of(node))
        those = sum(known.device_ns[s] for s in known.of(node) if known.kinds[s] in kinds)
        return those / total if total else None

    def _launches(self, trace: RankTrace) -> _Launches:
        if id(trace) not in self._known:
            log = next(iter(self.recosting.logs(trace)))
            self._known[id(trace)] = _Launches.of_log(log, self.recosting.model)
        return self._known[id(trace)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launches:
    """Which signatures each body node launched on its own stream, and what a signature is."""

    operators: list[str]
    kinds: list[str]
    device_ns: list[int]
    signatures: dict[int, list[int]]
    """By body node, in launch order; those that cost the device nothing are left out."""

    def of(self, node: int) -> list[int]:
        return self.signatures.get(node, [])

    @classmethod
    def of_log(cls, log: LaunchLog, model: KernelModel) -> _Launches:
        device_ns_S, _ = costs(log, model)
        signatures = {}
        for n in np.flatnonzero(log.path_N == NodePath.WORK).tolist():
            entries = np.arange(log.first_N[n], log.stop_N[n])
            own = log.signature_E[entries[log.lane_E[entries] == log.lane_N[n]]]
            launched = own[own != STATED]
            signatures[int(log.node_N[n])] = launched[device_ns_S[launched] > 0].tolist()
        return cls(
            operators=[s.removeprefix(REPLAYED).partition(FIELD)[0] for s in log.signatures],
            kinds=kinds(log, model),
            device_ns=device_ns_S.tolist(),
            signatures=signatures,
        )
