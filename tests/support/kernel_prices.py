"""What calls of operators cost on an H100."""

from __future__ import annotations

from prismscale.cost.kernel import KernelCost, load_kernel_model
from prismscale.cost.kernel_signature import FIELD

H100 = load_kernel_model("h100-sxm")


def text(name: str, inputs: str = "", outputs: str = "", arguments: str = "") -> str:
    """A signature of an ATen operator."""
    return FIELD.join((f"aten::{name}", inputs, outputs, arguments))


def cost(name: str, inputs: str = "", outputs: str = "", arguments: str = "") -> KernelCost:
    """Its cost on an H100."""
    return H100.cost(text(name, inputs, outputs, arguments))
