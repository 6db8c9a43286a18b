"""What a user asks of a run's answers, besides the job itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prismscale.errors import UsageError

DEFAULT_STEPS = 1000
"""Number of steps that GPU-hours are computed for by default."""
_CURRENCIES = {"$": "$", "€": "€", "£": "£", "usd": "$", "eur": "€", "gbp": "£"}
_FORM = re.compile(
    r"([$€£])?\s*(\d+(?:\.\d+)?)\s*(usd|eur|gbp|[$€£])?(?:/(?:gpu)?-?h(?:our)?)?", re.I
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Price of one GPU for one hour."""

    per_hour: float
    currency: str = "$"

    @staticmethod
    def parse(text: str) -> Price:
        """Parse ``2.5/h``, ``$2.5``, ``2.5 EUR/h``.

        Raises:
            UsageError: ``text`` has another form.
        """
        found = _FORM.fullmatch(text.strip())
        if found is None or (found[1] and found[3]):
            raise UsageError(f"--price {text!r}: give what a GPU costs an hour, for example 2.5/h")
        named = (found[1] or found[3] or "$").lower()
        return Price(per_hour=float(found[2]), currency=_CURRENCIES[named])


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Options of the user that answers depend on, besides the job itself."""

    price: Price | None = None
    for_steps: int = DEFAULT_STEPS
    tokens_per_step: int = 0
    """Tokens of the whole job; 0: as found in the run."""

    def __post_init__(self) -> None:
        if self.for_steps < 1:
            raise UsageError(f"--for-steps is {self.for_steps}; allowed: 1 or more")
        if self.tokens_per_step < 0:
            raise UsageError(f"--tokens-per-step is {self.tokens_per_step}; allowed: 1 or more")
