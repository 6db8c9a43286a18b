"""The matrix products that a call runs, their element type, and their time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from prismscale.cost.kernel_kinds import GENERATED
from prismscale.cost.kernel_profile import GemmRoofline, KernelProfile
from prismscale.cost.kernel_signature import KernelCall, TensorShape, item_bytes
from prismscale.cost.kernel_tiles import WIDE_RESULT, products_ns

_HALF = 2
"""Bytes of the 16-bit floats."""
NARROW = {8: "Float8_e4m3fn", 4: "Float4_e2m1fn_x2"}
"""Element types of narrow floats, by their bits."""
TF32, TF32_BITS, FLOAT_BITS = "TF32", 19, 32
"""TF32 is the 19-bit type in which tensor cores multiply floats of 32 bits."""
STATED_DTYPES = {**NARROW, TF32_BITS: TF32, FLOAT_BITS: "Float"}
"""Element types by the bits that a library's call states; for 16 the operands decide."""
TRITON = "triton"
"""Namespace of Triton's kernels."""
_HALVES = ("BFloat16", "Half")
_GROUPED = ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """``batch`` products of M × K and K × N."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k


def gemm_call_ns(profile: KernelProfile, call: KernelCall) -> float:
    """Return the time of a matrix product or convolution."""
    dtype = operand_dtype(call)
    roofline = roofline_of(profile, dtype)
    library = profile.libraries.get(call.namespace)
    if library is not None:
        roofline = library.of(roofline)
    products = products_of(call)
    busy = [p for p in products if p.flops]
    # ``products_ns`` counts one launch per product; a library's kernel may do several at once.
    (launches,) = call.arguments.get("launches", (len(products),))
    time_ns = roofline.base_ns * (launches - len(busy))
    if not busy:
        return time_ns
    n_bytes = sum(t.n_bytes for t in (*call.inputs, *call.outputs)) / len(products)
    extents = np.array([(p.batch, p.m, p.n, p.k) for p in busy], float).T
    bytes_of_each = np.full(len(busy), n_bytes)
    splits = library is None
    each = products_ns(
        profile, roofline, extents, bytes_of_each, factor_bytes(dtype), splits=splits
    )
    is_wide = item_bytes(dtype) == _HALF and _has_wide_results(call, busy)
    return time_ns + float(each.sum()) * (WIDE_RESULT if is_wide else 1.0)


def _has_wide_results(call: KernelCall, products: list[Product]) -> bool:
    """Return whether results have 32 bits; a library's call lists its results among its inputs."""
    results = sum(product.batch * product.m * product.n for product in products)
    wide = (t.elements for t in (*call.inputs, *call.outputs) if t.dtype == "Float")
    return sum(wide) >= results


def operand_dtype(call: KernelCall) -> str:
    """Return the element type in which the operands of a product or attention are multiplied.

    The second input is always an operand: a factor of the product, or one of queries, keys and
    values. Libraries keep floats of 8 and 4 bits as bytes, and state the bits in an argument.
    """
    if call.is_library and (bits := call.arguments.get("bits", (16,))[0]) in STATED_DTYPES:
        return STATED_DTYPES[bits]
    if call.namespace == TRITON:
        # Which tensors are factors is not known, only that factors have 16 bits, even if no input
        # has.
        return next((t.dtype for t in call.inputs if t.dtype in _HALVES), _HALVES[0])
    dtype = call.inputs[1].dtype if len(call.inputs) > 1 else "Float"
    return TF32 if dtype == "Float" and call.flag("tf32") else dtype


def factor_bytes(dtype: str) -> float:
    """Return the bytes of one number of a factor; torch counts two 4-bit numbers as one element."""
    return 0.5 if dtype == NARROW[4] else item_bytes(dtype)


def roofline_of(profile: KernelProfile, dtype: str) -> GemmRoofline:
    """Return the roofline of an element type; types without one take that of float32."""
    return own_roofline(profile, dtype) or profile.gemm["Float"]


def own_roofline(profile: KernelProfile, dtype: str) -> GemmRoofline | None:
    """Return the element type's own roofline, or None if it has none.

    Tensor cores multiply TF32 at half the rate of 16-bit floats.
    """
    halves = profile.gemm.get(_HALVES[0])
    if dtype == TF32 and dtype not in profile.gemm and halves is not None:
        return replace(halves, peak_flops=halves.peak_flops / 2)
    return profile.gemm.get(dtype)


def products_of(call: KernelCall) -> list[Product]:
    """Return the matrix products that ``call`` runs, one after another."""
    if call.is_library and "extents" in call.arguments:
        return _stated(call.arguments["extents"])
    base = call.base
    if base.startswith(GENERATED):
        return [_generated(call)]
    out = call.outputs[0]
    if "convolution" in base:
        return _convolutions(call)
    if base in _GROUPED:
        return [_grouped(call)]
    first, second = _operands(call)
    if base == "linear":
        n, k = second.sizes[0], second.sizes[-1]
        return [Product(batch=1, m=out.elements // max(n, 1), n=n, k=k)]
    # ``addbmm`` sums its products into one matrix.
    batch = first.sizes[0] if base == "addbmm" else math.prod(out.sizes[:-2])
    return [Product(batch=batch, m=out.sizes[-2], n=out.sizes[-1], k=_inner(first))]


def _inner(first: TensorShape) -> int:
    """Return the last extent of a first factor; two 4-bit numbers are one element."""
    return first.sizes[-1] * (2 if first.dtype == NARROW[4] else 1)


def _stated(extents: tuple[int, ...]) -> list[Product]:
    """Parse stated extents, four numbers per product: batch, M, N, K."""
    rows = zip(*[iter(extents)] * 4, strict=True)
    return [Product(batch=batch, m=m, n=n, k=k) for batch, m, n, k in rows]


def _generated(call: KernelCall) -> Product:
    """Return the product of a template that inductor filled in; its last input is the result."""
    first, second, out = call.inputs[0], call.inputs[1], call.inputs[-1]
    if "convolution" in call.base:
        return _convolution(out, second)
    m, k = first.sizes[-2:]
    return Product(batch=math.prod(first.sizes[:-2]), m=m, n=second.sizes[-1], k=k)


def _operands(call: KernelCall) -> tuple[TensorShape, TensorShape]:
    skipped = 1 if call.base in ("addmm", "baddbmm", "_addmm_activation", "addbmm") else 0
    return call.inputs[skipped], call.inputs[skipped + 1]


def _grouped(call: KernelCall) -> Product:
    """Return a mixture-of-experts product, whose rows, columns or inner elements the groups share.

    The number that each group gets is data, so tiles are counted as if all groups got the same.
    """
    first, second, out = call.inputs[0], call.inputs[1], call.outputs[0]
    k = _inner(first)
    if len(second.sizes) == 3:
        groups = second.sizes[0]
        rows = math.ceil(first.elements / first.sizes[-1] / groups)
        return Product(batch=groups, m=rows, n=second.sizes[-1], k=k)
    if len(first.sizes) == 3:
        groups, rows = first.sizes[:2]
        return Product(batch=groups, m=rows, n=math.ceil(second.sizes[-1] / groups), k=k)
    groups = out.sizes[0]
    return Product(batch=groups, m=out.sizes[-2], n=out.sizes[-1], k=math.ceil(k / groups))


def _convolutions(call: KernelCall) -> list[Product]:
    """Return convolutions as implicit matrix products; the gradient is two of the forward size.

    Gradients that are not asked for are missing among the outputs; that of the bias is a vector.
    """
    transposed = call.flag("transposed")
    if "backward" in call.base:
        grad, given, weight = call.inputs[:3]
        wanted = [t for t in call.outputs if len(t.sizes) > 1 and t.elements]
        return [_convolution(given if transposed else grad, weight)] * len(wanted)
    given, weight = call.inputs[:2]
    return [_convolution(given if transposed else call.outputs[0], weight)]


def _convolution(out: TensorShape, weight: TensorShape) -> Product:
    """Return the product of a convolution with this result; a transposed one is a convolution the
    other way, whose result is the input."""
    channels = weight.sizes[0]
    return Product(
        batch=1, m=out.elements // max(channels, 1), n=channels, k=math.prod(weight.sizes[1:])
    )
