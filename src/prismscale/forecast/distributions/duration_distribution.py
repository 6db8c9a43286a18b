"""Distributions of durations, and how one is chosen for a pool.

Normal, Gamma and LogNormal are the families of PRISM (arXiv 2510.15596, section on fits), chosen by
the Kolmogorov-Smirnov (KS) distance. Two more are ours: a body with a tail of rare stalls, and the
pool itself. All values are nanoseconds in float64, never negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import scipy
from numpy.typing import NDArray

from prismscale.errors import FormatError

Floats = NDArray[np.float64]

FEWEST_TO_FIT = 8
"""Durations that a pool needs for a fit. Smaller pools are sampled as they are, because no family
can be told from another."""
KS_REJECTS = 1.36
"""Multiplied by 1/√n: the KS distance beyond which a family is rejected at the 5 % level."""
PARAMETER_PENALTY = 0.1
"""Multiplied by 1/√n: how much each further parameter must reduce the KS distance."""
TAIL_POINTS = 4_000
"""Number of quantiles that represent a distribution with a borrowed tail."""
STALL_DEVIATIONS = 6.0
"""Robust standard deviations above the median at which a duration counts as a stall."""
LEAST_SKEWED_CV = 1e-5
"""Standard deviation over mean from which on skewed families are fitted. With less they are as
symmetric as a normal distribution, and their parameters would be rounding noise."""


class DurationDistribution(Protocol):
    """A distribution of non-negative durations."""

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Return independent draws in ns."""
        ...

    def quantile(self, q: Floats) -> Floats:
        """Return the duration in ns at each probability of ``q``."""
        ...

    def cdf(self, x: Floats) -> Floats:
        """Return the probability of a duration of at most ``x`` ns."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Normal:
    """Normal distribution, cut at 0: draws below 0 become 0."""

    mean: float
    std: float

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        draws = rng.standard_normal(shape)
        draws *= self.std
        draws += self.mean
        return np.maximum(draws, 0.0, out=draws)

    def quantile(self, q: Floats) -> Floats:
        return np.maximum(scipy.stats.norm.ppf(q, self.mean, self.std), 0.0)

    def cdf(self, x: Floats) -> Floats:
        return np.where(x < 0, 0.0, scipy.stats.norm.cdf(x, self.mean, self.std))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gamma:
    """Gamma distribution that begins at 0."""

    shape: float
    scale: float

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return rng.gamma(self.shape, self.scale, shape)

    def quantile(self, q: Floats) -> Floats:
        return np.asarray(scipy.stats.gamma.ppf(q, self.shape, scale=self.scale))

    def cdf(self, x: Floats) -> Floats:
        return np.asarray(scipy.stats.gamma.cdf(x, self.shape, scale=self.scale))


@dataclass(frozen=True, kw_only=True, slots=True)
class LogNormal:
    """Log-normal distribution: the logarithm of a duration is normal."""

    mean_log: float
    std_log: float

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        return rng.lognormal(self.mean_log, self.std_log, shape)

    def quantile(self, q: Floats) -> Floats:
        return np.asarray(scipy.stats.lognorm.ppf(q, self.std_log, scale=np.exp(self.mean_log)))

    def cdf(self, x: Floats) -> Floats:
        return np.asarray(scipy.stats.lognorm.cdf(x, self.std_log, scale=np.exp(self.mean_log)))


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyAndTail:
    """Mixture of ordinary durations and rare stalls.

    A duration is a stall with probability ``stall``. Stalls are exponentially distributed from
    ``tail_from`` on.
    """

    body: DurationDistribution
    stall: float
    tail_from: float
    """Shortest stall, ns."""
    tail_scale: float
    """Mean time by which a stall exceeds ``tail_from``, ns."""

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        stalls = self.tail_from + rng.exponential(self.tail_scale, shape)
        return np.where(rng.random(shape) < self.stall, stalls, self.body.sample(rng, shape))

    def quantile(self, q: Floats) -> Floats:
        q = np.asarray(q, dtype=np.float64)
        body = self.body.quantile(np.minimum(q / (1 - self.stall), 1 - 1e-12))
        over = np.clip((q - (1 - self.stall)) / self.stall, 0.0, 1 - 1e-12)
        tail = self.tail_from - self.tail_scale * np.log1p(-over)
        return np.where(q <= 1 - self.stall, np.minimum(body, self.tail_from), tail)

    def cdf(self, x: Floats) -> Floats:
        past = np.maximum(x - self.tail_from, 0.0)
        tail = -np.expm1(-past / self.tail_scale)
        return np.asarray((1 - self.stall) * self.body.cdf(x) + self.stall * tail)


@dataclass(frozen=True, kw_only=True)
class Empirical:
    """The pool itself, drawn with replacement."""

    sorted_ns: Floats
    """Durations in ns, ascending."""

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        n = len(self.sorted_ns)
        # Random 16-bit integers cost half as much as 64-bit ones.
        kind = np.uint16 if n <= 2**16 else np.int64
        return self.sorted_ns.take(rng.integers(0, n, shape, dtype=kind))

    def quantile(self, q: Floats) -> Floats:
        return np.asarray(np.quantile(self.sorted_ns, q))

    def cdf(self, x: Floats) -> Floats:
        return np.searchsorted(self.sorted_ns, x, side="right") / len(self.sorted_ns)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A distribution, and how well it describes the pool that it was chosen for."""

    distribution: DurationDistribution
    ks: float
    """KS distance between the distribution and the pool."""
    n: int
    """Number of durations in the pool."""
    note: str = ""
    """Caveat for whoever relies on the fit; empty if there is none."""

    @property
    def name(self) -> str:
        """Name of the family."""
        return type(self.distribution).__name__


def borrowed_tail(own: Floats, others: Sequence[Floats]) -> Empirical:
    """Return the distribution of a sample whose far tail is the usual one of other samples.

    The last :data:`FEWEST_TO_FIT` durations of a sample form its far tail. They are too few to
    determine it: a repetition has other stalls. So the far tail is the sample's last quantile
    before it, raised by the median factor by which the other samples rise from their quantile at
    the same place.

    Args:
        own: durations in ns.
        others: samples of other jobs of the same kind; without any, the sample is its own
            distribution.

    Raises:
        FormatError: see :func:`check_durations`.
    """
    flat = np.sort(check_durations(own))
    at = (np.arange(TAIL_POINTS) + 0.5) / TAIL_POINTS
    quantiles_ns = np.quantile(flat, at)
    far = at > 1 - FEWEST_TO_FIT / len(flat)
    if not others or far.all():
        return Empirical(sorted_ns=flat)
    last = int(np.flatnonzero(~far)[-1])
    found = [np.quantile(check_durations(o), at) for o in others]
    rise = np.median([np.log(q[far] / q[last]) for q in found], axis=0)
    quantiles_ns[far] = quantiles_ns[last] * np.exp(rise)
    return Empirical(sorted_ns=quantiles_ns)


def check_durations(samples: Floats, what: str = "pool") -> Floats:
    """Return ``samples`` as a flat float64 array.

    Raises:
        FormatError: the array is empty, or holds negative or non-finite durations; the message says
            how many.
    """
    flat = np.asarray(samples, dtype=np.float64).ravel()
    not_finite = int((~np.isfinite(flat)).sum())
    negative = int((flat < 0).sum())
    if flat.size == 0:
        raise FormatError(f"{what}: no durations at all; record at least one step")
    if not_finite or negative:
        raise FormatError(
            f"{what}: {not_finite} of {flat.size} durations are not finite and {negative} are "
            "negative; durations must be 0 or more, so correct the clocks or drop these steps"
        )
    return flat


def ks_distance(distribution: DurationDistribution, samples: Floats) -> float:
    """Return the largest gap between a distribution's CDF and the empirical CDF of ``samples``."""
    x, counts = np.unique(samples, return_counts=True)
    after = np.cumsum(counts) / counts.sum()
    before = after - counts / counts.sum()
    # The limit from the left: where a CDF jumps, its value before the jump is compared with the
    # pool's.
    left = distribution.cdf(np.nextafter(x, -np.inf))
    right = distribution.cdf(x)
    return float(max(np.abs(right - after).max(), np.abs(left - before).max()))


def fit(samples: Floats, what: str = "pool") -> Fit:
    """Choose the distribution that describes a pool best.

    Families compete by KS distance plus :data:`PARAMETER_PENALTY` per parameter. The pool itself is
    used where even the winner is rejected (:data:`KS_REJECTS`), and where the pool is too small to
    tell.

    Args:
        samples: durations in ns, any shape.
        what: name of the pool in errors.

    Raises:
        FormatError: see :func:`check_durations`.
    """
    flat = np.sort(check_durations(samples, what))
    n = len(flat)
    empirical = Empirical(sorted_ns=flat)
    if n < FEWEST_TO_FIT:
        many = "one duration" if n == 1 else f"{n} durations"
        return Fit(distribution=empirical, ks=0.0, n=n, note=f"only {many}: no tail to be seen")
    if flat[0] == flat[-1]:
        return Fit(distribution=empirical, ks=0.0, n=n, note="all durations are equal")
    scored = [(ks_distance(d, flat), k, d) for d, k in _candidates(flat)]
    ks, _, best = min(scored, key=lambda s: s[0] + PARAMETER_PENALTY * s[1] / np.sqrt(n))
    if ks > KS_REJECTS / np.sqrt(n):
        note = f"no family fits (nearest {type(best).__name__}, KS {ks:.3f}): the pool itself"
        return Fit(distribution=empirical, ks=0.0, n=n, note=note)
    return Fit(distribution=best, ks=ks, n=n)


def _candidates(flat: Floats) -> list[tuple[DurationDistribution, int]]:
    """Return the fitted families with their numbers of parameters."""
    families: list[tuple[DurationDistribution, int]] = [(d, 2) for d in _two_parameter(flat)]
    stalls = flat > _stall_threshold(flat)
    body = flat[~stalls]
    if stalls.any() and len(body) >= FEWEST_TO_FIT and body[0] < body[-1]:
        tail = flat[stalls]
        scale = max(float(tail.mean() - tail[0]), float(tail[0]) * 1e-6)
        for inner in _two_parameter(body):
            mixture = BodyAndTail(
                body=inner,
                stall=float(stalls.mean()),
                tail_from=float(tail[0]),
                tail_scale=scale,
            )
            families.append((mixture, 5))
    return families


def _two_parameter(flat: Floats) -> list[DurationDistribution]:
    mean, std = float(flat.mean()), float(flat.std())
    found: list[DurationDistribution] = [Normal(mean=mean, std=std)]
    # Below this spread the skewed families say the same, and SciPy cannot fit a Gamma.
    if flat[0] > 0 and std > LEAST_SKEWED_CV * mean:
        shape, _, scale = scipy.stats.gamma.fit(flat, floc=0)
        spread, _, middle = scipy.stats.lognorm.fit(flat, floc=0)
        found.append(Gamma(shape=float(shape), scale=float(scale)))
        found.append(LogNormal(mean_log=float(np.log(middle)), std_log=float(spread)))
    return found


def _stall_threshold(flat: Floats) -> float:
    median = float(np.median(flat))
    # 1.4826 makes the median absolute deviation a standard deviation for a normal distribution.
    robust = 1.4826 * float(np.median(np.abs(flat - median)))
    return median + STALL_DEVIATIONS * robust
