"""Time model of fused attention, for one call or many at once.

Queries are cut into blocks of 128 rows, which are distributed over the multiprocessors; a block
reads the keys that the mask leaves, one block of keys after another. In the backward pass blocks of
keys read queries, and there are five products where the forward has two (FlashAttention-2, arXiv
2307.08691, section 3.1.2). Each block also takes as long as ``length_overhead`` more keys to start
up and to write its result, and ``causal_overhead`` more under a causal mask, whose diagonal blocks
are computed whole. Exponentials cost as much as ``head_overhead`` more elements of a head, and a
deterministic backward pass, which sums in a fixed order, ``fixed_order_overhead`` more. Idle
multiprocessors of the last wave cost a share of a wave (``wave_rounding``), and no call is faster
than its longest block. Moving queries, keys, values and results hardly overlaps with computing.

A sustained load is slower than a burst: see ``POWER_RESERVE``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.kernel_tiles import POWER_SHARPNESS, bend

if TYPE_CHECKING:
    from prismscale.cost.kernel_profile import AttentionRoofline, GemmRoofline, KernelProfile

BACKWARD_FACTOR = 2.5
CAUSAL = 0.5
"""Share of the scores that a causal mask leaves."""
POWER_RESERVE = 1.33
"""Attention sustains a larger share of its burst speed than a product does, by this factor, because
softmax keeps the tensor cores waiting. Taken from SimuMax's attention of 32,768 tokens and more on
a B200: 0.8 of cuDNN's burst."""
_BLOCK = 128
_LARGEST_REORDERED = 128
"""Head size beyond which a backward pass sums in a fixed order anyway: cuDNN's for heads of 192 on
a GB200 takes as long with and without it."""
_HEAD_SIZES = np.array([64, 96, 128, 192, 256])
"""Head sizes that kernels are compiled for; others are padded."""
_MEMORY_SHARPNESS, _LONGEST_SHARPNESS = 1.3, 8.0


@dataclass(frozen=True, slots=True)
class AttentionShapes:
    """Shapes of calls; each field has one element per call."""

    batch_heads: NDArray[np.float64]
    length: NDArray[np.float64]
    keys: NDArray[np.float64]
    head_size: NDArray[np.float64]
    value_size: NDArray[np.float64]
    share: NDArray[np.float64]
    """Share of the scores that the mask leaves."""
    n_bytes: NDArray[np.float64]
    """Bytes read and written."""


def attention_times_ns(
    profile: KernelProfile,
    roofline: AttentionRoofline,
    products: GemmRoofline,
    shapes: AttentionShapes,
    *,
    backward: bool,
    in_fixed_order: bool = False,
    splits_keys: bool = False,
) -> NDArray[np.float64]:
    """Compute the times of calls.

    Args:
        profile: the GPU.
        roofline: the roofline of the implementation.
        products: the products of the element type, for its peak and the sustained share of it.
        shapes: the shapes of the calls.
        backward: whether the calls are backward passes.
        in_fixed_order: whether backward passes are deterministic.
        splits_keys: whether a block's keys may be distributed, as programs for inference do.

    Returns:
        One time per call, in ns.
    """
    blocked, read = (shapes.keys, shapes.length) if backward else (shapes.length, shapes.keys)
    diagonal = np.where(shapes.share == CAUSAL, _BLOCK / 2 + roofline.causal_overhead, 0.0)
    average = read * shapes.share + diagonal + roofline.length_overhead
    overhead = np.full_like(shapes.head_size, roofline.head_overhead)
    if backward and in_fixed_order:
        overhead[shapes.head_size <= _LARGEST_REORDERED] += roofline.fixed_order_overhead
    sizes = _padded(shapes.head_size) + _padded(shapes.value_size) + 2 * overhead
    factor = np.where(shapes.share < 1, roofline.causal_factor, 1.0)
    speed = products.peak_flops * roofline.efficiency * factor / profile.multiprocessors
    row_s = 2 * _BLOCK * sizes * (BACKWARD_FACTOR if backward else 1.0) / speed
    waves = shapes.batch_heads * np.ceil(blocked / _BLOCK) / profile.multiprocessors
    rounded = roofline.wave_rounding
    computing = (rounded * np.ceil(waves) + (1 - rounded) * waves) * average * row_s
    if not splits_keys:
        longest = (read + roofline.length_overhead) * row_s
        computing = bend((computing, longest), _LONGEST_SHARPNESS)
    computing = computing / lasting_share(products)
    bandwidth = roofline.memory_efficiency * profile.memory_bandwidth_bytes_per_s
    seconds = bend((computing, shapes.n_bytes / bandwidth), _MEMORY_SHARPNESS)
    return roofline.base_ns + 1e9 * seconds


def lasting_share(products: GemmRoofline) -> float:
    """Return the sustained speed, relative to that of a burst."""
    if products.sustained_cap is None:
        return 1.0
    wanted = products.efficiency / (POWER_RESERVE * products.sustained_cap)
    return float((1 + wanted**POWER_SHARPNESS) ** (-1 / POWER_SHARPNESS))


def _padded(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round up to the next size that kernels are compiled for; larger sizes stay as they are."""
    places = np.searchsorted(_HEAD_SIZES, sizes)
    known = _HEAD_SIZES[np.minimum(places, len(_HEAD_SIZES) - 1)]
    return np.where(places < len(_HEAD_SIZES), known, sizes).astype(float)
