"""What-ifs on kernel costs, as changes of a :class:`~prismscale.cost.kernel.KernelModel`.

A change says which calls it touches and what these calls then cost. All costs come from one changed
model, so a stored run that is costed again and a live rank take the same times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from prismscale.cost.kernel import KernelCost, KernelModel
from prismscale.cost.kernel_gemm import NARROW, operand_dtype
from prismscale.cost.kernel_kinds import kind_of
from prismscale.cost.kernel_signature import FIELD, KernelCall, parse_signature
from prismscale.errors import UsageError

PRODUCT_DTYPES = {
    "fp8": "Float8_e4m3fn",
    "bf16": "BFloat16",
    "fp16": "Half",
    "fp32": "Float",
}
"""Element types that products can be computed in, with their C++ spelling."""
_FLOATS = ("BFloat16", "Half", "Float")
_MULTIPLE = 16
"""``torch._scaled_mm`` multiplies 8-bit matrices whose extents are multiples of this."""
_OPERAND = re.compile(r"(\w+)(\[\d+(?:,\d+)+\].*)")
"""An operand of two extents or more. A bias has one extent, so it does not match and stays."""


class KernelChange(Protocol):
    """A change of the cost of some calls."""

    def touches(self, call: KernelCall) -> bool:
        """Return whether the cost of ``call`` changes."""
        ...

    def cost(self, signature: str, model: KernelModel) -> KernelCost:
        """Return the changed cost of a touched call, from the unchanged ``model``."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFactor:
    """A factor on the device time of kernels whose kind or operator matches a pattern."""

    pattern: str
    """Regular expression for a full name: a kind (``attention_backward``) or operator (``mm``)."""
    factor: float
    """Factor on the device time; the host time of issuing the kernel stays."""

    def touches(self, call: KernelCall) -> bool:
        """Return whether the pattern matches one of the call's names."""
        kind = kind_of(call)
        names = (kind, kind.replace("_", " "), call.base, call.name)
        return any(re.fullmatch(self.pattern, name) for name in names)

    def cost(self, signature: str, model: KernelModel) -> KernelCost:
        """Return the model's cost with the factor on the device time."""
        cost = model.cost(signature)
        return replace(cost, device_ns=round(cost.device_ns * self.factor))


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFactor:
    """A factor on the host time of issuing calls: another processor, or another pace of Python."""

    factor: float

    def touches(self, call: KernelCall) -> bool:
        """Return true, because every call is issued by the host."""
        return True

    def cost(self, signature: str, model: KernelModel) -> KernelCost:
        """Return the model's cost with the factor on the host time."""
        cost = model.cost(signature)
        return replace(cost, host_ns=round(cost.host_ns * self.factor))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductDtype:
    """Matrix products in another element type. The cost of casting to it is not included."""

    name: str
    """A key of :data:`PRODUCT_DTYPES`."""

    def touches(self, call: KernelCall) -> bool:
        """Return whether the call is a product of floats of another type, with extents that fit."""
        if kind_of(call) != "gemm":
            return False
        if call.is_library and operand_dtype(call) in NARROW.values():
            return operand_dtype(call) != PRODUCT_DTYPES[self.name]
        matrices = [t for t in call.inputs if len(t.sizes) > 1 and t.dtype in _FLOATS]
        if len(matrices) < 2:
            return call.is_library and self.name == "fp8" and "extents" in call.arguments
        if matrices[1].dtype == PRODUCT_DTYPES[self.name]:
            return False
        extents = (extent for t in matrices for extent in t.sizes[-2:])
        return self.name != "fp8" or all(extent % _MULTIPLE == 0 for extent in extents)

    def cost(self, signature: str, model: KernelModel) -> KernelCost:
        """Return the model's cost of the same product in the other type.

        Raises:
            UsageError: the GPU's profile has no rule for that type.
        """
        cost = model.cost(self._rewritten(signature))
        if cost.source == "default":
            raise UsageError(
                f"what-if 'dtype={self.name}': no rule says what such products cost on this GPU; "
                f"allowed are those of {', '.join(PRODUCT_DTYPES)} that it has units for"
            )
        return cost

    def _rewritten(self, signature: str) -> str:
        name, inputs, outputs, arguments = signature.split(FIELD)
        if parse_signature(signature).is_library:
            kept = [part for part in arguments.split(";") if part and not part.startswith("bits=")]
            arguments = ";".join([*kept, f"bits={8 if self.name == 'fp8' else 16}"])
        operands = ";".join(self._operand(part) for part in inputs.split(";"))
        return FIELD.join((name, operands, outputs, arguments))

    def _operand(self, text: str) -> str:
        found = _OPERAND.fullmatch(text)
        if found is None or found[1] not in _FLOATS:
            return text
        return PRODUCT_DTYPES[self.name] + found[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedKernels:
    """A kernel model with one change on top."""

    model: KernelModel
    change: KernelChange

    def cost(self, signature: str) -> KernelCost:
        """Return the changed cost of a touched call, or the model's cost of any other."""
        if not self.change.touches(parse_signature(signature)):
            return self.model.cost(signature)
        return self.change.cost(signature, self.model)


def changed_kernels(model: KernelModel, changes: Sequence[KernelChange]) -> KernelModel:
    """Return ``model`` with all changes, each on top of those before it."""
    for change in changes:
        model = ChangedKernels(model=model, change=change)
    return model
