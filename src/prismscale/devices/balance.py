"""Loads of the ranks that hold experts, from statistics of their *balance ratio*.

The balance ratio of a rank is its number of tokens over an equal share (PrismLLM, "MoE mock
router").
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from prismscale.errors import UsageError

PRESETS = {"balanced": 1.0, "mild": 1.2, "moderate": 1.5, "heavy": 2.0, "extreme": 3.0}
"""Balance ratio of the fullest rank; the ratios of the others fall with a power of their place.
The figures are our own: round numbers from no imbalance to a job several times as slow."""
MOST_RANKS = 1024
_TOLERANCE = 0.02
"""Allowed error of a requested statistic: relative, or absolute below 1."""
_MOST_KNOTS = 33
"""Most places whose ratios are fitted; the ratios of the ranks between them are interpolated."""
_EVENNESS = 1e-4
"""Weight of the variance in the fit: too small to move the statistics that are requested."""
_STATISTICS = ("min", "max", "avg", "std", "median", "skew")


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Statistics of the balance ratio over the ranks of one step. A statistic that is None is free.

    Raises :class:`UsageError` for values that no loads can have.
    """

    ranks: int
    min: float | None = None
    max: float | None = None
    avg: float | None = None
    """1 by definition of the ratio. Another value scales all ratios, but does not change the loads
    relative to each other."""
    std: float | None = None
    """Population standard deviation over all ranks (the divisor is their number)."""
    median: float | None = None
    skew: float | None = None
    """Third central moment over std cubed."""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MOST_RANKS:
            raise UsageError(f"--routing over {self.ranks} ranks; allowed: 1 … {MOST_RANKS}")
        for name in ("min", "max", "std", "median"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= self.ranks:
                raise UsageError(
                    f"--routing {name}={value:g} over {self.ranks} ranks; a ratio to the equal "
                    f"share is from 0 to {self.ranks}"
                )

    @classmethod
    def parse(cls, text: str) -> Balance:
        """Read ``ranks=8,max=1.5,std=0.3``.

        Raises:
            UsageError: a name is unknown, a value is no number, or ``ranks`` is missing.
        """
        allowed = [field.name for field in fields(cls)]
        given: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                if name not in allowed:
                    raise ValueError
                given[name] = float(value)
            except ValueError:
                raise UsageError(
                    f"--routing balance:{text}: {part!r} is not NAME=NUMBER with one of "
                    f"{', '.join(allowed)}"
                ) from None
        return cls.of(given)

    @classmethod
    def of(cls, given: dict[str, float]) -> Balance:
        """Make one from numbers by name.

        Raises:
            UsageError: the number of ranks is missing, or not whole.
        """
        ranks = given.pop("ranks", 0.0)
        if ranks < 1 or ranks != int(ranks):
            raise UsageError("--routing by balance ratio: give ranks=N, over which experts lie")
        return cls(ranks=int(ranks), **given)

    def ratios(self) -> tuple[float, ...]:
        """Return a ratio for each rank, the fullest first.

        Raises:
            UsageError: no loads have these statistics.
        """
        mean = 1.0 if self.avg is None else self.avg
        low = 0.0 if self.min is None else self.min / mean
        high = float(self.ranks) if self.max is None else self.max / mean
        found = _fitted(self, low, high, mean)
        self._refuse_others(found * mean)
        return tuple(float(x) for x in found[::-1])

    def _refuse_others(self, found: NDArray[np.float64]) -> None:
        reached = statistics(found)
        for name in _STATISTICS:
            asked, value = getattr(self, name), reached[name]
            if asked is not None and abs(value - asked) > _TOLERANCE * max(abs(asked), 1.0):
                nearest = ", ".join(f"{n} {reached[n]:.3g}" for n in _STATISTICS)
                raise UsageError(
                    f"--routing: no loads of {self.ranks} ranks have {name} {asked:g} together "
                    f"with the others; the nearest have {nearest}"
                )


def statistics(ratios: NDArray[np.float64]) -> dict[str, float]:
    """Return the statistics of given ratios, by the names that :class:`Balance` has."""
    std = float(ratios.std())
    third = float(((ratios - ratios.mean()) ** 3).mean())
    return {
        "min": float(ratios.min()),
        "max": float(ratios.max()),
        "avg": float(ratios.mean()),
        "std": std,
        "median": float(np.median(ratios)),
        "skew": third / std**3 if std > 1e-9 else 0.0,
    }


def _fitted(balance: Balance, low: float, high: float, mean: float) -> NDArray[np.float64]:
    """Fit ratios with mean 1 to the statistics; returns them in ascending order.

    A given minimum and maximum are met exactly, the other statistics by least squares. The ratios
    are as even as the statistics allow.
    """
    n = balance.ranks
    knots = min(n, _MOST_KNOTS)
    place = np.linspace(0, knots - 1, n)

    def ratios(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.interp(place, np.arange(knots), x)

    bounds = [(low, high)] * knots
    if balance.min is not None:
        bounds[0] = (low, low)
    if balance.max is not None:
        bounds[-1] = (high, high)

    def misfit(x: NDArray[np.float64]) -> float:
        reached = statistics(ratios(x) * mean)
        asked = ((name, getattr(balance, name)) for name in ("std", "median", "skew"))
        wrong = sum((reached[name] - value) ** 2 for name, value in asked if value is not None)
        return float(wrong + _EVENNESS * (ratios(x) - 1).var())

    ends = np.linspace(max(low, 0.0), min(high, 2.0), knots) if n > 1 else np.ones(1)
    start = np.clip(ends / ends.mean() if ends.mean() else ends + 1, low, high)
    solved = optimize.minimize(
        misfit,
        start,
        bounds=bounds,
        constraints={"type": "eq", "fun": lambda x: ratios(x).mean() - 1},
        method="SLSQP",
        options={"maxiter": 300, "ftol": 1e-14},
    )
    return np.sort(ratios(solved.x))


def ratios_of_preset(name: str, ranks: int) -> tuple[float, ...]:
    """Return loads that fall with a power of the rank's place; the first has the preset's ratio.

    Raises:
        UsageError: this number of ranks cannot be so uneven, or is out of range.
    """
    highest = PRESETS[name]
    if not 1 <= ranks <= MOST_RANKS or highest > ranks:
        raise UsageError(
            f"--routing {name}:{ranks}: the fullest rank has {highest:g} times an equal share, "
            f"which takes {max(1, int(np.ceil(highest)))} to {MOST_RANKS} ranks"
        )
    place = np.arange(1, ranks + 1, dtype=np.float64)

    def first(exponent: float) -> float:
        load = place**-exponent
        return float(load[0] / load.mean())

    exponent = 0.0
    if highest > 1.0 and highest < ranks:
        exponent = float(optimize.brentq(lambda e: first(e) - highest, 0.0, 64.0))
    load = place**-exponent if highest < ranks else (place == 1).astype(np.float64)
    return tuple(float(x) for x in load / load.mean())
