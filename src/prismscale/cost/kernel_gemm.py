"""Matrix products of a call: which, of what element type, and what they cost together."""

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
"""Of floats of 32 bits, those that tensor cores multiply, in 19."""
STATED_DTYPES = {**NARROW, TF32_BITS: TF32, FLOAT_BITS: "Float"}
"""By the bits that a library's call states; 16 leaves it to the operands."""
TRITON = "triton"
"""Namespace of its kernels."""
_HALVES = ("BFloat16", "Half")


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """``batch`` products of M × K and K × N."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k


def gemm_call_ns(profile: KernelProfile, call: KernelCall) -> float:
    """Time of a matrix product or convolution."""
    dtype = operand_dtype(call)
    roofline = roofline_of(profile, dtype)
    library = profile.libraries.get(call.namespace)
    if library is not None:
        roofline = library.of(roofline)
    products = products_of(call)
    busy = [p for p in products if p.flops]
    # Each product has its own launch in what follows; a library's kernel may do several at once.
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
    """Whether results are of 32 bits; those of a library's call are among its inputs."""
    results = sum(product.batch * product.m * product.n for product in products)
    wide = (t.elements for t in (*call.inputs, *call.outputs) if t.dtype == "Float")
    return sum(wide) >= results


def operand_dtype(call: KernelCall) -> str:
    """Element type that a product's or an attention's operands are multiplied in.

    The second input is a factor of the product, and one of queries, keys and values. Libraries keep
    floats of 8 and 4 bits as bytes, and say so with an argument.
    """
    if call.is_library and (bits := call.arguments.get("bits", (16,))[0]) in STATED_DTYPES:
        return STATED_DTYPES[bits]
    if call.namespace == TRITON:
        # Which of its tensors are factors is not known: 16 bits are said, wherever they come from.
        return next((t.dtype for t in call.inputs if t.dtype in _HALVES), _HALVES[0])
    dtype = call.inputs[1].dtype if len(call.inputs) > 1 else "Float"
    return TF32 if dtype == "Float" and call.flag("tf32") else dtype


def factor_bytes(dtype: str) -> float:
    """Bytes of one number of a product's factors; torch counts two of 4 bits as one element."""
    return 0.5 if dtype == NARROW[4] else item_bytes(dtype)


def roofline_of(profile: KernelProfile, dtype: str) -> GemmRoofline:
    """The roofline of an element type; types without one take that of float32."""
    return own_roofline(profile, dtype) or profile.gemm["Float"]


def own_roofline(profile: KernelProfile, dtype: str) -> GemmRoofline | None:
    """The element type's own, where it has one. Tensor cores multiply TF32 at half the rate of 16
    bits."""
    halves = profile.gemm.get(_HALVES[0])
    if dtype == TF32 and dtype not in profile.gemm and halves is not None:
        return replace(halves, peak_flops=halves.peak_flops / 2)
    return profile.gemm.get(dtype)


def products_of(call: KernelCall) -> list[Product]:
    """The matrix products that ``call`` runs, one after another."""
    if call.is_library and "extents" in call.arguments:
        return _stated(call.arguments["extents"])
    base = call.base
    if base.startswith(GENERATED):
        return [_generated(call)]
    out = call.outputs[0]
    if "convolution" in base:
        return _convolutions(call)
    if base in ("_grouped_mm", "_scaled_grouped_mm"):
        return [_grouped(call)]
    first, second = _operands(call)
    if base == "linear":
        n, k = second.sizes[0], second.sizes[-1]
        return [Product(batch=1, m=out.elements // max(n, 1), n=n, k=k)]
    batch = math.prod(out.sizes[:-2])
    return [Product(batch=batch, m=out.sizes[-2], n=out.sizes[-1], k=first.sizes[-1])]


def _stated(extents: tuple[int, ...]) -> list[Product]:
    """Four numbers a product: batch, M, N, K."""
    rows = zip(*[iter(extents)] * 4, strict=True)
    return [Product(batch=batch, m=m, n=n, k=k) for batch, m, n, k in rows]


def _generated(call: KernelCall) -> Product:
    """Of a template that inductor filled in: factors first, the result (an argument) last."""
    first, second, out = call.inputs[0], call.inputs[1], call.inputs[-1]
    if "convolution" in call.base:
        return _convolution(out, second)
    m, k = first.sizes[-2:]
    return Product(batch=math.prod(first.sizes[:-2]), m=m, n=second.sizes[-1], k=k)


def _operands(call: KernelCall) -> tuple[TensorShape, TensorShape]:
    skipped = 1 if call.base in ("addmm", "baddbmm", "_addmm_activation", "addbmm") else 0
    return call.inputs[skipped], call.inputs[skipped + 1]


def _grouped(call: KernelCall) -> Product:
    """Mixture-of-experts products: rows (or inner elements) are shared out between the groups.

    How many each group gets is data; the tiles are counted as if all got the same.
    """
    first, second, out = call.inputs[0], call.inputs[1], call.outputs[0]
    if len(second.sizes) == 3:
        groups = second.sizes[0]
        rows = math.ceil(first.elements / first.sizes[-1] / groups)
        return Product(batch=groups, m=rows, n=second.sizes[-1], k=first.sizes[-1])
    groups = out.sizes[0]
    return Product(
        batch=groups, m=out.sizes[-2], n=out.sizes[-1], k=math.ceil(first.sizes[-1] / groups)
    )


def _convolutions(call: KernelCall) -> list[Product]:
    """Convolutions as implicit matrix products: the gradient is two of the forward's size."""
    if "backward" in call.base:
        grad, _, weight = call.inputs[:3]
        return [_convolution(grad, weight)] * len([t for t in call.outputs[:2] if t.elements])
    return [_convolution(call.outputs[0], call.inputs[1])]


def _convolution(out: TensorShape, weight: TensorShape) -> Product:
    channels = weight.sizes[0]
    return Product(
        batch=1, m=out.elements // max(channels, 1), n=channels, k=math.prod(weight.sizes[1:])
    )
