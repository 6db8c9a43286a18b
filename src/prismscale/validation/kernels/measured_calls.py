"""Measurements of calls of the null device: the same signatures that a program's kernels have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prismscale.cost.kernel import ModelledKernels
from prismscale.cost.kernel_signature import FIELD


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCalls:
    """One measurement."""

    gpu: str
    group: str
    """Rows that are scored together, such as ``norm forward, torch``."""
    signatures: tuple[str, ...]
    """Of the kernels that were timed together."""
    time_ns: float

    def predicted_ns(self, model: ModelledKernels) -> int:
        """What ``model`` says of them together."""
        return sum(model.cost(signature).device_ns for signature in self.signatures)

    def error_percent(self, model: ModelledKernels) -> float:
        """Predicted over measured less one, in %."""
        return 100 * (self.predicted_ns(model) / self.time_ns - 1)


def tensor(dtype: str, *sizes: int, strides: Sequence[int] = ()) -> str:
    """A tensor of a signature."""
    text = f"{dtype}[{','.join(map(str, sizes))}]"
    return text + ("@" + ",".join(map(str, strides)) if strides else "")


def call(name: str, reads: Sequence[str], writes: Sequence[str], arguments: str = "") -> str:
    """A signature."""
    name = name if "::" in name else f"aten::{name}"
    return FIELD.join((name, ";".join(reads), ";".join(writes), arguments))
