"""Cost of the program's kernels, and how often each runs in a step.

A trace holds whole spans. The table beside it lists the kernels that they consist of. The report
shows it, and exactly these kernels can be measured on one real GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from prismscale.analysis.emulated import KernelUse
from prismscale.cost.kernel import KernelCost, KernelModel
from prismscale.devices.null.bindings import COST_CALLBACK
from prismscale.devices.null.runtime import NullRuntime

if TYPE_CHECKING:
    _IntPointer = ctypes._Pointer[ctypes.c_int64]

LAUNCH_LATENCY_NS = 2_000
"""Part of a kernel's time in which it has no thread block on the device yet: an empty kernel's
time. Kernels of other streams may run meanwhile; see ``csrc/sharing.h``."""
BESIDE_KINDS = ("exchange", "transfer")
"""Kinds that leave the multiprocessors to other streams: exchanges of tokens occupy a few of them,
copies to and from the host none."""


@dataclass(frozen=True, slots=True)
class _Count:
    """How often one signature ran."""

    calls: int = 0
    replayed: int = 0
    """Of them, by CUDA graphs."""

    def __add__(self, other: _Count) -> _Count:
        return _Count(self.calls + other.calls, self.replayed + other.replayed)


class KernelLedger:
    """Answers the extension's questions about the cost of ops by a model, and counts the calls."""

    def __init__(self, runtime: NullRuntime, model: KernelModel) -> None:
        self._library = runtime.library
        self._model = model
        self._costs: dict[str, KernelCost] = {}
        self._calls: list[dict[int, _Count]] = []
        """Per optimizer call: calls of each signature since the one before."""
        self.slowness = 1.0
        """Factor on all times of the model; set before the program runs."""
        self._callback = COST_CALLBACK(self._cost)  # kept: C++ holds a bare pointer to it
        self._library.ps_set_cost(ctypes.cast(self._callback, ctypes.c_void_p), 0, 0)
        self._take_calls()  # earlier calls belong to no step
        self._library.ps_count_calls(1)

    @property
    def n_steps(self) -> int:
        """Number of optimizer calls so far."""
        return len(self._calls)

    def optimizer_ended(self) -> None:
        """Note the end of an optimizer call.

        The calls since the one before are counted together, and the extension counts the launches
        in its queues from 0 again.
        """
        self._library.ps_spans_step_ended()
        self._calls.append(self._take_calls())

    def uses(self, first: int, stop: int) -> list[KernelUse]:
        """Return the kernels of the step whose optimizer calls are ``[first, stop)``.

        The kernel with the longest total time comes first.
        """
        total: dict[int, _Count] = {}
        for calls in self._calls[first:stop]:
            for number, count in calls.items():
                total[number] = total.get(number, _Count()) + count
        found = []
        for number, count in total.items():
            signature = self._library.ps_signature(number).decode()
            cost = self._cost_of(signature)
            found.append(
                KernelUse(
                    signature=signature,
                    calls=count.calls,
                    replayed=count.replayed,
                    kind=cost.kind,
                    device_ns=cost.device_ns,
                    host_ns=cost.host_ns,
                    source=cost.source,
                    error=-1.0 if cost.error is None else cost.error,
                )
            )
        return sorted(found, key=lambda use: -use.total_ns)

    def _take_calls(self) -> dict[int, _Count]:
        calls, replayed = np.zeros((2, self._library.ps_signature_count()), dtype=np.int64)
        self._library.ps_take_calls(calls.ctypes.data, replayed.ctypes.data, len(calls))
        return {int(s): _Count(int(calls[s]), int(replayed[s])) for s in np.flatnonzero(calls)}

    def _cost_of(self, signature: str) -> KernelCost:
        cost = self._costs.get(signature)
        if cost is None:
            cost = self._costs[signature] = self._model.cost(signature)
        return cost

    def _cost(
        self, signature: bytes, device_ns: _IntPointer, host_ns: _IntPointer, busy_ns: _IntPointer
    ) -> None:
        cost = self._cost_of(signature.decode())
        device_ns[0] = round(cost.device_ns * self.slowness)
        host_ns[0] = round(cost.host_ns * self.slowness)
        is_beside = cost.kind in BESIDE_KINDS
        busy_ns[0] = 0 if is_beside else max(0, device_ns[0] - LAUNCH_LATENCY_NS)
