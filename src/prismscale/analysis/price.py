"""What an hour of one GPU costs, as people write it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prismscale.errors import UsageError

_CURRENCIES = {"$": "$", "€": "€", "£": "£", "usd": "$", "eur": "€", "gbp": "£"}
_FORM = re.compile(
    r"([$€£])?\s*(\d+(?:\.\d+)?)\s*(usd|eur|gbp|[$€£])?(?:/(?:gpu)?-?h(?:our)?)?", re.I
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Of one GPU for one hour."""

    per_hour: float
    currency: str = "$"

    @staticmethod
    def parse(text: str) -> Price:
        """``2.5/h``, ``$2.5``, ``2.5 EUR/h``.

        Raises:
            UsageError: something else.
        """
        found = _FORM.fullmatch(text.strip())
        if found is None or (found[1] and found[3]):
            raise UsageError(f"--price {text!r}: give what a GPU costs an hour, for example 2.5/h")
        named = (found[1] or found[3] or "$").lower()
        return Price(per_hour=float(found[2]), currency=_CURRENCIES[named])
