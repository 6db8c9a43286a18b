"""The list of public kernel measurements on which no constant may be fitted.

Rows are held out by *family*, never one by one. The list (``held_out.toml`` beside this module) was
drawn by the rule of ``tools/fit/hold_out.py`` before anything was fitted, and is not drawn again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from prismscale.errors import UsageError
from prismscale.typed_files import decode, parse


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """The frozen list of held-out families."""

    seed: str
    share: float
    """Share of the families of each set that is held out."""
    whole: tuple[str, ...]
    """Sets that are held out completely."""
    families: Mapping[str, tuple[str, ...]]
    """Held-out families by set."""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UsageError(f"share {self.share} of held-out families must lie between 0 and 1")

    @classmethod
    def load(cls) -> HeldOut:
        """Load the list of this package."""
        file = resources.files("prismscale.validation.kernels").joinpath("held_out.toml")
        origin = "list of held-out families"
        return decode(cls, parse(file.read_text(encoding="utf-8"), origin), origin)

    def holds(self, rows: str, family: str) -> bool:
        """Whether ``family`` of the set ``rows`` is held out."""
        return rows in self.whole or family in self.families.get(rows, ())
