"""Number of tokens that each expert gets, as an input of a run.

Routing is data, which a null device does not have. A program on synthetic data has only the routing
of an untrained router.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Relative loads of experts.

    Raises :class:`UsageError` for loads that are below 0 or sum to 0, and for an exponent out of
    range.
    """

    loads: tuple[tuple[float, ...], ...] = ()
    """Loads by step, then by expert. They apply if a program has this number of experts. The steps
    repeat after the last one. Empty: :attr:`exponent` applies."""
    of_ranks: bool = False
    """Whether the loads are those of ranks, over which experts are spread evenly and in order. They
    then apply if the number of experts is a multiple of the number of ranks."""
    exponent: float = 0.0
    """Expert ``i`` (from 1) gets a share in proportion to ``i ** -exponent``; 0: equal shares."""

    def __post_init__(self) -> None:
        for row in self.loads:
            if any(load < 0 for load in row) or not sum(row):
                raise UsageError("--routing takes loads of at least 0 that do not sum to 0")
        if not 0 <= self.exponent <= 10:
            raise UsageError(
                f"--routing zipf:{self.exponent:g}: give zipf:S with S from 0 to 10; expert i "
                "gets a share in proportion to i^-S"
            )

    def shares_in(self, step: int, experts: int) -> NDArray[np.float64] | None:
        """Return each expert's share of all choices in ``step`` (from 0); the shares add up to 1.

        None if the loads do not apply to this number of experts.
        """
        if not self.loads:
            load = np.arange(1, experts + 1, dtype=np.float64) ** -self.exponent
        else:
            load = np.array(self.loads[step % len(self.loads)])
            if self.of_ranks and experts % len(load) == 0:
                load = load.repeat(experts // len(load))
            elif len(load) != experts:
                return None
        return load / load.sum()


def spread(total: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Spread ``total`` choices over the experts as the null device does.

    Rounding the running sum keeps the total exact.
    """
    upto = (np.cumsum(shares) * total + 0.5).astype(np.int64)
    return np.diff(upto, prepend=0)
