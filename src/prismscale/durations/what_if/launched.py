"""The calls that one captured rank launches in a step: their counts and their time.

Axes: ``E`` entries of the rank's log, ``S`` signatures.
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
from prismscale.cost.launch_log import REPLAYED, STATED, LaunchLog, costs


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The calls that one captured rank launches in a step."""

    log: LaunchLog
    model: KernelModel

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The parsed call of each signature."""
        return tuple(parse_signature(s.removeprefix(REPLAYED)) for s in self.log.signatures)

    @cached_property
    def costs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[str, ...]]:
        """Cost on the device, cost on the host, and kind of each signature."""
        device_ns_S, host_ns_S = costs(self.log, self.model)
        kinds = (self.model.cost(s.removeprefix(REPLAYED)).kind for s in self.log.signatures)
        return device_ns_S, host_ns_S, tuple(kinds)

    def touched(self, change: KernelChange) -> tuple[Counter[str], float]:
        """Count the kernels that a change touches by kind, and add up their device time in ns."""
        return self._named([change.touches(call) for call in self.calls])

    def issued(self) -> tuple[Counter[str], float]:
        """Count all kernels by kind, and add up the host time in ns of issuing all calls."""
        _, host_ns_S, _ = self.costs
        return self.kinds, float((self._count_S() * host_ns_S).sum())

    def recomputed(self) -> tuple[Counter[str], float]:
        """Count the kernels of recomputed parts by kind, and add up their device time in ns."""
        return self._named([True] * len(self.calls), self.log.is_recomputed_E)

    @property
    def kinds(self) -> Counter[str]:
        """Counts of the kernels that take time on the device, by kind."""
        return self._named([True] * len(self.calls))[0]

    @property
    def operators(self) -> Counter[str]:
        """Counts of the kernels that take time on the device, by operator."""
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
            # A call without device time launches no kernel.
            if count and ns:
                found[name] += count
        return found

    def _count_S(self, counted_E: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        launches_E = self.log.signature_E != STATED
        if counted_E is not None:
            launches_E = launches_E & counted_E
        return np.bincount(self.log.signature_E[launches_E], minlength=len(self.log.signatures))
