"""How many tokens each expert gets: an input, because routing is data that a null device lacks, and
that a program on synthetic data has only of an untrained router.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Relative load of experts.

    Raises :class:`UsageError` for loads below 0, that sum to 0, or an exponent out of range.
    """

    loads: tuple[tuple[float, ...], ...] = ()
    """By step, then by expert; applies where a program has as many experts. After the last step the
    first comes again. Empty: see exponent."""
    of_ranks: bool = False
    """Loads are those of ranks, over which experts are spread evenly and in order; they apply
    where the number of experts is a multiple of theirs."""
    exponent: float = 0.0
    """Expert ``i`` (from 1) gets a share in proportion to ``i ** -exponent``; 0: all the same."""

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
        """What each of so many experts gets of all tokens, adding up to 1, in a step (from 0); None
        where nothing is said of as many."""
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
    """``total`` choices by expert, as the null device spreads them: rounding the running sum keeps
    the total exact."""
    upto = (np.cumsum(shares) * total + 0.5).astype(np.int64)
    return np.diff(upto, prepend=0)
