"""Devices that are slower than others for as long as a run lasts, and the slowest of a set.

Ranks of a tensor-parallel group meet after every few kernels: between two meetings the slowest of
them counts. One member of the drawn graph stands for such a set, and takes the largest of its
ranks' durations. Each duration is ``1 + s·(z + q·e)``. ``z`` is the device's own slowness, ``e``
the random variation of this execution, ``s`` how much the node depends on the device, and ``q`` how
large the random variation is relative to slowness. The mean and standard deviation of the largest
over ``e`` come from Clark's approximation (C. E. Clark, "The greatest of a finite set of random
variables", Operations Research 9(2), 1961), taken two at a time, beginning with the slowest device.

Array axes: ``D`` draws, ``R`` ranks, ``K`` ranks of a set, ``M`` members of a class (sets).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import NDArray

Slowness = NDArray[np.float32]

STEPS_PER_OCTAVE = 2
"""Tabulated ratios of random variation to slowness, for each factor of two between them."""
EQUAL_POINTS = 2**16
"""Number of evenly spaced quantiles that represent a distribution."""
LARGEST_RATIO = 64.0
"""Largest tabulated ratio. Beyond it, devices are practically equal."""


def slowness(
    rng: np.random.Generator, draws: int, node_R: NDArray[np.int64], node_share: float
) -> Slowness:
    """Draw the slowness ``[D, R]`` of every rank's device, in standard deviations.

    Args:
        node_R: the node of each rank, from 0.
        node_share: share of the variance that devices of one node have in common.
    """
    of_device = rng.standard_normal((draws, len(node_R)), dtype=np.float32)
    if not node_share:
        return of_device
    of_node = rng.standard_normal((draws, int(node_R.max()) + 1), dtype=np.float32)
    own, common = np.sqrt(np.float32(1 - node_share)), np.sqrt(np.float32(node_share))
    return own * of_device + common * of_node[:, node_R]


@dataclass(kw_only=True)
class SlowestOfSets:
    """The slowest device of each set of one class, in one chunk of draws."""

    slowness_DKM: Slowness
    _known: dict[float, tuple[Slowness, Slowness]] = field(default_factory=dict)

    def at(self, ratio: float) -> tuple[Slowness, Slowness | float]:
        """Return mean ``[D, M]`` and standard deviation over ``e`` of ``max(z + ratio·e)``.

        Both are in standard deviations of the slowness.
        """
        if self.slowness_DKM.shape[1] == 1:
            return self.slowness_DKM[:, 0], ratio
        tabled = _tabled(ratio)
        if tabled not in self._known:
            self._known[tabled] = greatest(self.slowness_DKM, tabled)
        mean, deviation = self._known[tabled]
        return mean, deviation


def _tabled(ratio: float) -> float:
    """Return the nearest tabulated ratio."""
    if ratio <= 0:
        return 0.0
    octave = round(np.log2(min(ratio, LARGEST_RATIO)) * STEPS_PER_OCTAVE)
    return float(2 ** (octave / STEPS_PER_OCTAVE))


@lru_cache(maxsize=64)
def largest_of_equal(of: int) -> tuple[float, float]:
    """Return mean and deviation of the largest of ``of`` standard normal variables."""
    at = (np.arange(EQUAL_POINTS) + 0.5) / EQUAL_POINTS
    quantiles = scipy.special.ndtri(at ** (1 / of))
    return float(quantiles.mean()), float(quantiles.std())


def greatest(mean_DKM: Slowness, deviation: float) -> tuple[Slowness, Slowness]:
    """Return mean and deviation of the greatest of ``K`` independent normal variables.

    The variables have different means and the same deviation.
    """
    ordered = -np.sort(-mean_DKM, axis=1)
    mean = ordered[:, 0]
    if deviation == 0:
        return mean, np.zeros_like(mean)
    variance = np.full_like(mean, deviation**2)
    for k in range(1, ordered.shape[1]):
        mean, variance = _greater(mean, variance, ordered[:, k], np.float32(deviation**2))
    return mean, np.sqrt(variance)


def _greater(
    mean: Slowness, variance: Slowness, other: Slowness, other_variance: np.float32
) -> tuple[Slowness, Slowness]:
    """Return mean and variance of the greater of two independent normal variables.

    These are Clark's equations (2) and (3).
    """
    apart = np.sqrt(variance + other_variance)
    alpha = (mean - other) / apart
    above = scipy.special.ndtr(alpha).astype(np.float32)
    density = np.exp(-0.5 * alpha**2) / np.float32(np.sqrt(2 * np.pi))
    first = mean * above + other * (1 - above) + apart * density
    second = (
        (mean**2 + variance) * above
        + (other**2 + other_variance) * (1 - above)
        + (mean + other) * apart * density
    )
    return first, np.maximum(second - first**2, np.float32(0))
