"""What one captured rank launches in a step: how often, and what it takes.

Axes: ``E`` entries of its log, ``S`` signatures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.kernel import KernelModel
from prismscale.cost.kernel_changes import KernelChange
from prismscale.cost.kernel_signature import KernelCall, parse_signature
from prismscale.cost.launch_log import HOST_ONLY, REPLAYED, LaunchLog, costs


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What one captured rank launches in a step."""

    log: LaunchLog
    model: KernelModel

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """By signature."""
        return tuple(parse_signature(s.removeprefix(REPLAYED)) for s in self.log.signatures)

    @cached_property
    def costs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[str, ...]]:
        """On the device and the host, and the kind, by signature."""
        device_ns_S, host_ns_S = costs(self.log, self.model)
        kinds = (self.model.cost(s.removeprefix(REPLAYED)).kind for s in self.log.signatures)
        return device_ns_S, host_ns_S, tuple(kinds)

    def touched(self, change: KernelChange) -> tuple[Counter[str], float]:
        """Kernels that a change touches, by kind, and what they take on the device."""
        return self._named([change.touches(call) for call in self.calls])

    def issued(self) -> tuple[Counter[str], float]:
        """All kernels by kind, and what issuing all calls takes the host."""
        _, host_ns_S, _ = self.costs
        return self.kinds, float((self._count_S() * host_ns_S).sum())

    def recomputed(self) -> tuple[Counter[str], float]:
        """Kernels of parts that are computed a second time."""
        return self._named([True] * len(self.calls), self.log.is_recomputed_E)

    @property
    def kinds(self) -> Counter[str]:
        """Kinds of kernels that take time."""
        return self._named([True] * len(self.calls))[0]

    @property
    def operators(self) -> Counter[str]:
        """Their operators."""
        return self._counted([call.base for call in self.calls], self._count_S())

    def _named(
        self, touched_S: Sequence[bool], counted_E: NDArray[np.bool_] | None = None
    ) -> tuple[Counter[str], float]:
        device_ns_S, _, kinds = self.costs
        count_S = self._count_S(counted_E) * np.array(touched_S, dtype=bool)
        return self._counted(kinds, count_S), float((count_S * device_ns_S).sum())

    def _counted(self, names: Sequence[str], count_S: NDArray[np.int64]) -> Counter[str]:
        device_ns_S, _, _ = self.costs
        found = Counter[str]()
        for name, count, ns in zip(names, count_S.tolist(), device_ns_S.tolist(), strict=True):
            # What launches nothing is no kernel.
            if count and ns:
                found[name] += count
        return found

    def _count_S(self, counted_E: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        launches_E = self.log.signature_E != HOST_ONLY
        if counted_E is not None:
            launches_E = launches_E & counted_E
        return np.bincount(self.log.signature_E[launches_E], minlength=len(self.log.signatures))
