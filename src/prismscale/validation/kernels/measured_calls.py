"""Measurements of kernel calls, written with the signatures that the null device uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_signature import FIELD


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCalls:
    """One measurement of one or more calls."""

    gpu: str
    group: str
    """Name of the rows that are scored together, such as ``norm forward, torch``."""
    signatures: tuple[str, ...]
    """Signatures of the kernels that were timed together."""
    time_ns: float

    def predicted_ns(self, model: ModelledKernels) -> int:
        """Return the device time that ``model`` predicts for all calls together."""
        return sum(model.cost(signature).device_ns for signature in self.signatures)

    def error_percent(self, model: ModelledKernels) -> float:
        """Return predicted over measured time, minus 1, in %."""
        return 100 * (self.predicted_ns(model) / self.time_ns - 1)


def tensor(dtype: str, *sizes: int, strides: Sequence[int] = ()) -> str:
    """Return a tensor as it stands in a signature."""
    text = f"{dtype}[{','.join(map(str, sizes))}]"
    return text + ("@" + ",".join(map(str, strides)) if strides else "")


def call(name: str, reads: Sequence[str], writes: Sequence[str], arguments: str = "") -> str:
    """Return the signature of a call."""
    name = name if "::" in name else f"aten::{name}"
    return FIELD.join((name, ";".join(reads), ";".join(writes), arguments))
