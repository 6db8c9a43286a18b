"""Matrix products: tiles, waves, and an inner loop that takes time to get going.

A product of ``batch`` matrices M × K and K × N is cut into output tiles. The GPU works on as many
tiles at once as it has multiprocessors; the last of these waves may be nearly empty, and still
takes a whole wave's time. One tile costs its ``2·m·n·(K + k_overhead)`` operations at the
multiprocessor's share of the peak. Small products split K over several tiles and add the parts.
The library picks the fastest tiling, and so does :func:`gemm_ns`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prismscale.cost.kernel_kinds import GENERATED
from prismscale.cost.kernel_profile import GemmRoofline, KernelProfile
from prismscale.cost.kernel_signature import KernelCall, TensorShape

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4, 8, 16)
_LARGEST = TILES[0][0] * TILES[0][1]


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
    roofline = roofline_of(profile, operand_dtype(call))
    n_bytes = sum(t.n_bytes for t in (*call.inputs, *call.outputs))
    products = products_of(call)
    return sum(gemm_ns(profile, roofline, p, n_bytes / len(products)) for p in products)


def operand_dtype(call: KernelCall) -> str:
    """Element type that a product's or an attention's operands are multiplied in.

    The second input is a factor of the product, and one of queries, keys and values. Libraries keep
    8-bit floats as bytes, and say so with an argument.
    """
    if call.is_library and call.flag("fp8"):
        return "Float8_e4m3fn"
    return call.inputs[1].dtype if len(call.inputs) > 1 else "Float"


def roofline_of(profile: KernelProfile, dtype: str) -> GemmRoofline:
    """The roofline of an element type; types without one take that of float32."""
    return profile.gemm.get(dtype, profile.gemm["Float"])


def gemm_ns(
    profile: KernelProfile, roofline: GemmRoofline, product: Product, n_bytes: float
) -> float:
    """Time of ``product`` whose operands and result are ``n_bytes``."""
    if product.flops == 0:
        return roofline.base_ns
    bandwidth = profile.memory_bandwidth_bytes_per_s * profile.memory["copy"].efficiency
    busy = min(
        _tiled_ns(profile, roofline, product, tile, split) for tile in TILES for split in SPLITS
    )
    return roofline.base_ns + max(busy, 1e9 * n_bytes / bandwidth)


def _tiled_ns(
    profile: KernelProfile,
    roofline: GemmRoofline,
    product: Product,
    tile: tuple[int, int],
    split: int,
) -> float:
    m, n = tile
    tiles = product.batch * math.ceil(product.m / m) * math.ceil(product.n / n) * split
    waves = math.ceil(tiles / profile.multiprocessors)
    halvings = math.log2(_LARGEST / (m * n))
    speed = roofline.peak_flops * roofline.efficiency * roofline.small_tile_factor ** (halvings / 2)
    k = math.ceil(product.k / split) + roofline.k_overhead
    busy = waves * 2e9 * m * n * k / (speed / profile.multiprocessors)
    if split == 1:
        return busy
    parts = 2 * 4 * split * product.batch * product.m * product.n
    return busy + 1e9 * parts / profile.memory_bandwidth_bytes_per_s


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
