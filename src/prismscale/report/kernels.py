"""Report rows and sentences about kernels that never ran, and about made-up values."""

from __future__ import annotations

from prismscale.analysis.emulated import KernelKind, KernelUse, ValueUse
from prismscale.analysis.result import RunResult
from prismscale.cost.kernel_signature import TensorShape, parse_signature
from prismscale.errors import FormatError
from prismscale.report.units import counted, duration, percent

MOST_TENSORS, MOST_OPERATORS, MOST_REGIONS = 4, 6, 6
KIND_HEADS = ("Kind", "Share", "Calls", "Time", "Source", "Error")
CALL_HEADS = ("Call", "Share", "Calls", "Each", "Source", "Error")
VALUE_HEADS = ("Asked", "Where", "Answer", "Times")
_ASKED = {"_local_scalar_dense": "item()"}
"""Expressions with which a program calls operators."""
_DTYPES = {"BFloat16": "bf16", "Half": "f16", "Float": "f32", "Double": "f64", "Long": "i64"}


def kind_rows(result: RunResult) -> list[tuple[str, ...]]:
    """Return one row per kind and source, as :data:`KIND_HEADS`; shares are of device time."""
    return [_kind_row(kind, total_ns(result)) for kind in result.kernels]


def call_rows(result: RunResult) -> list[tuple[str, ...]]:
    """Return one row for each of the most expensive calls, with columns :data:`CALL_HEADS`."""
    return [_call_row(use, total_ns(result)) for use in result.largest_kernels]


def value_rows(result: RunResult) -> list[tuple[str, ...]]:
    """Return one row for each line that read a made-up value, with columns :data:`VALUE_HEADS`."""
    return [_value_row(use) for use in result.values]


def total_ns(result: RunResult) -> int:
    """Return the device time of all kernels, but at least 1."""
    return sum(kernel.device_ns for kernel in result.kernels) or 1


def coverage_sentence(result: RunResult) -> str:
    """State how much of the kernels' time has a cost rule or measurement, and what has neither."""
    covered = result.kernel_coverage
    if not result.unknown_operators:
        return "Every kernel has a rule of cost or a measurement."
    whole = total_ns(result)
    named = [
        f"{o.op} ({counted(o.calls, 'call')}, {percent(o.device_ns / whole)})"
        for o in result.unknown_operators[:MOST_OPERATORS]
    ]
    left = len(result.unknown_operators) - len(named)
    more = f" and {counted(left, 'more operator')}" if left > 0 else ""
    return (
        f"{percent(covered)} of the kernels' time rests on rules of cost or measurements. Costed "
        f"by the bytes that they touch, for want of either: {', '.join(named)}{more}. Give their "
        "times with --kernels (docs/kernels.md)."
    )


def stand_in_sentences(result: RunResult) -> list[str]:
    """State which libraries a stand-in replaced, and their share of the kernels' time."""
    return [
        f"{' '.join(part for part in (library.name, library.version) if part)} "
        f"({', '.join(library.modules)}): {percent(library.share)} of the kernels' time, "
        f"{counted(library.calls, 'call')}."
        for library in result.stand_ins
    ]


def eager_sentence(result: RunResult) -> str:
    """State which regions torch.compile should have compiled but ran eagerly, and why."""
    regions = result.eager_regions
    named = [f"{r.region} ({counted(r.count, 'time')}; {r.reason})" for r in regions[:MOST_REGIONS]]
    left = len(regions) - len(named)
    more = f"; and {counted(left, 'more region')}, see results.json" if left > 0 else ""
    return (
        "Compiled regions that ran operator by operator, so that their time and memory are not "
        f"those of torch.compile: {'; '.join(named)}{more}."
    )


def call_text(signature: str) -> str:
    """Return a call as text: ``mm(bf16[16384, 4096], bf16[4096, 14336]ᵀ)``."""
    try:
        call = parse_signature(signature)
    except FormatError:
        return signature
    shapes = [_shape(tensor) for tensor in call.inputs if tensor.sizes][:MOST_TENSORS]
    more = ["…"] if sum(1 for t in call.inputs if t.sizes) > MOST_TENSORS else []
    return f"{call.base}({', '.join([*shapes, *more])})"


def _shape(tensor: TensorShape) -> str:
    sizes = ", ".join(map(str, tensor.sizes))
    turned = tensor.strides is not None and len(tensor.sizes) == 2 and tensor.strides[0] == 1
    return f"{_DTYPES.get(tensor.dtype, tensor.dtype.lower())}[{sizes}]{'ᵀ' if turned else ''}"


def _kind_row(kind: KernelKind, whole: int) -> tuple[str, ...]:
    return (
        kind.kind.replace("_", " "),
        percent(kind.device_ns / whole),
        f"{kind.calls:,}",
        duration(kind.device_ns),
        kind.source,
        _error(kind.error),
    )


def _call_row(use: KernelUse, whole: int) -> tuple[str, ...]:
    return (
        call_text(use.signature),
        percent(use.total_ns / whole),
        f"{use.calls:,}",
        duration(use.device_ns),
        use.source,
        _error(use.error),
    )


def _error(error: float) -> str:
    return "unknown" if error < 0 else f"±{100 * error:.0f} %"


def _value_row(use: ValueUse) -> tuple[str, ...]:
    op = use.op.removeprefix("aten::")
    return (_ASKED.get(op, op), use.call_site, use.answer, f"{use.count:,}")
