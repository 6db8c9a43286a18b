"""Parses the price of one GPU for an hour."""

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
