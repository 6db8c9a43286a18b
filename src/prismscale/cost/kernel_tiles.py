"""Time model of matrix products, for one product or many at once.

A product of ``batch`` matrices M × K and K × N is cut into output tiles, which are distributed over
the multiprocessors. A tile of m × n is computed at ``i / (i + tile_overhead)`` of the asymptotic
speed, where ``i = m·n/(m + n)`` is how often the tile reuses what it loads. Its inner loop takes
``k_overhead`` more steps than K to start up and to write the result. Idle multiprocessors of the
last wave cost a share of a wave (``wave_rounding``): all of it where all tiles take equally long,
none where the library splits the rest over all multiprocessors or where the clock rises meanwhile.
All tiles read their operands from the L2 cache. Small products split K over several tiles and add
the parts. The library picks the fastest tiling, and so does :func:`products_ns`.

No product is faster than its bytes can move. A sustained load is not faster than the power limit
allows: no more than ``sustained_cap`` of the peak. Benchmarks of single kernels end before that
limit takes effect, so they are compared with
:meth:`~prismscale.cost.kernel_profile.KernelProfile.burst`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from prismscale.cost.kernel_profile import GemmRoofline, KernelProfile

TILES = ((256, 128), (128, 256), (192, 128), (128, 192), (128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 3, 4, 6, 8, 16)
_OPTIONS = np.array([(m, n, split) for m, n in TILES for split in SPLITS], float).T[:, None, :]
_WHOLE = np.array([(m, n, 1) for m, n in TILES], float).T[:, None, :]
_K_STEP = 64
"""Parts of a split K are a multiple of this."""
_PART_BYTES = 4
MEMORY_SHARPNESS, POWER_SHARPNESS = 6.0, 3.5
"""Sharpness of the bends where bytes, and where power, become the limit; the second is fitted on
SimuMax's rows."""

WIDE_RESULT = 1.05
"""Relative time of a product of 16-bit factors with a result accumulated in 32 bits: the median of
75 gradients of weights that SimuMax measured on a B200."""


def products_ns(
    profile: KernelProfile,
    roofline: GemmRoofline,
    extents: NDArray[np.float64],
    n_bytes: NDArray[np.float64],
    item_bytes: float,
    *,
    splits: bool = True,
) -> NDArray[np.float64]:
    """Compute the times of products.

    Args:
        profile: the GPU.
        roofline: the roofline of the factors' element type.
        extents: batch, M, N and K, one column per product; none of them is 0.
        n_bytes: bytes of each product's factors and result.
        item_bytes: bytes of one number of a factor.
        splits: whether the library splits K where that is faster.

    Returns:
        One time per product, in ns.
    """
    options = _OPTIONS if splits else _WHOLE
    busy = _busy_s(profile, roofline, extents, item_bytes, options)
    memory = n_bytes / (roofline.memory_efficiency * profile.memory_bandwidth_bytes_per_s)
    seconds = bend((busy, memory), MEMORY_SHARPNESS)
    if roofline.sustained_cap is not None:
        allowed = 2 * extents.prod(0) / (roofline.peak_flops * roofline.sustained_cap)
        seconds = bend((seconds, allowed), POWER_SHARPNESS)
    return roofline.base_ns + 1e9 * seconds


def _busy_s(
    profile: KernelProfile,
    roofline: GemmRoofline,
    extents: NDArray[np.float64],
    item_bytes: float,
    options: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the seconds that the fastest tiling of ``options`` takes."""
    batch, rows, columns, inner = extents[:, :, None]
    m, n, split = options
    reuse = m * n / (m + n)
    speed = roofline.peak_flops * roofline.efficiency * reuse / (reuse + roofline.tile_overhead)
    part = np.where(split > 1, np.ceil(inner / split / _K_STEP) * _K_STEP, inner)
    tiles = batch * np.ceil(rows / m) * np.ceil(columns / n)
    waves = tiles * split / profile.multiprocessors
    rounded = roofline.wave_rounding
    waves = rounded * np.ceil(waves) + (1 - rounded) * np.maximum(waves, 1)
    steps = part + roofline.k_overhead
    computing = waves * 2 * m * n * steps * profile.multiprocessors / speed
    bandwidth = profile.memory_bandwidth_bytes_per_s
    loading = tiles * (m + n) * inner * item_bytes / (roofline.cache_factor * bandwidth)
    parts = np.where(split > 1, _PART_BYTES * (split + 1) * batch * rows * columns, 0) / bandwidth
    return (np.maximum(computing, loading) + parts).min(1)


def bend(
    seconds: tuple[NDArray[np.float64], NDArray[np.float64]], sharpness: float
) -> NDArray[np.float64]:
    """Return the longer of two times, smoothed upwards where the two are close."""
    longer, shorter = np.maximum(*seconds), np.minimum(*seconds)
    return longer * (1 + (shorter / longer) ** sharpness) ** (1 / sharpness)
