"""Which public kernel measurements no constant may be fitted on.

Rows are held out by *family*, never one by one. The list (``held_out.toml`` beside this module) was
drawn by the rule of ``tools/fit/hold_out.py`` before anything was fitted, and is not drawn anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from prismscale.errors import UsageError
from prismscale.typed_files import decode, parse


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """The frozen list."""

    seed: str
    share: float
    """Of the families of a set."""
    whole: tuple[str, ...]
    """Sets of which nothing is fitted."""
    families: Mapping[str, tuple[str, ...]]
    """Held-out families by set."""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UsageError(f"share {self.share} of held-out families must lie between 0 and 1")

    @classmethod
    def load(cls) -> HeldOut:
        """The list of this package."""
        file = resources.files("prismscale.validation.kernels").joinpath("held_out.toml")
        origin = "list of held-out families"
        return decode(cls, parse(file.read_text(encoding="utf-8"), origin), origin)

    def holds(self, rows: str, family: str) -> bool:
        """Whether ``family`` of the set ``rows`` is held out."""
        return rows in self.whole or family in self.families.get(rows, ())
