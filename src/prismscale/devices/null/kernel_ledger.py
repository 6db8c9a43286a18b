"""What the program's kernels cost, and how often each runs in a step.

A trace holds whole spans. The table beside it says which kernels they are made of: for the report,
and for measuring exactly these kernels on one real GPU.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from prismscale.analysis.emulated import KernelUse
from prismscale.cost.kernel import KernelModel, KernelPrice
from prismscale.devices.null.bindings import COST_CALLBACK
from prismscale.devices.null.runtime import NullRuntime

if TYPE_CHECKING:
    _IntPointer = ctypes._Pointer[ctypes.c_int64]


class KernelLedger:
    """Prices the program's ops by a model, and counts them."""

    def __init__(self, runtime: NullRuntime, model: KernelModel) -> None:
        self._library = runtime.library
        self._model = model
        self._prices: dict[str, KernelPrice] = {}
        self._calls: list[dict[int, int]] = []
        """Calls by signature number, of each interval between two optimizer calls."""
        self.slowness = 1.0
        """Time of everything over what the model says; set before the program runs."""
        self._callback = COST_CALLBACK(self._price)  # kept: C++ holds a bare pointer to it
        self._library.ps_set_cost(ctypes.cast(self._callback, ctypes.c_void_p), 0, 0)
        self._take_calls()  # what ran before is nobody's
        self._library.ps_count_calls(1)

    @property
    def n_steps(self) -> int:
        """Optimizer calls so far."""
        return len(self._calls)

    def optimizer_ended(self) -> None:
        """What ran since the last time belongs to one step; launches are counted from here."""
        self._library.ps_spans_step_ended()
        self._calls.append(self._take_calls())

    def uses(self, first: int, stop: int) -> list[KernelUse]:
        """Kernels of the step that the optimizer calls ``[first, stop)`` end, longest in all
        first."""
        total: dict[int, int] = {}
        for calls in self._calls[first:stop]:
            for number, count in calls.items():
                total[number] = total.get(number, 0) + count
        found = []
        for number, count in total.items():
            signature = self._library.ps_signature(number).decode()
            price = self._price_of(signature)
            found.append(
                KernelUse(
                    signature=signature,
                    calls=count,
                    kind=price.kind,
                    device_ns=price.device_ns,
                    host_ns=price.host_ns,
                    source=price.source,
                    error=-1.0 if price.error is None else price.error,
                )
            )
        return sorted(found, key=lambda use: -use.total_ns)

    def _take_calls(self) -> dict[int, int]:
        counts = np.zeros(self._library.ps_signature_count(), dtype=np.int64)
        self._library.ps_take_calls(counts.ctypes.data, len(counts))
        used = np.flatnonzero(counts)
        return dict(zip(used.tolist(), counts[used].tolist(), strict=True))

    def _price_of(self, signature: str) -> KernelPrice:
        price = self._prices.get(signature)
        if price is None:
            price = self._prices[signature] = self._model.price(signature)
        return price

    def _price(self, signature: bytes, device_ns: _IntPointer, host_ns: _IntPointer) -> None:
        price = self._price_of(signature.decode())
        device_ns[0] = round(price.device_ns * self.slowness)
        host_ns[0] = round(price.host_ns * self.slowness)
