"""How a job ran whose ranks heard real values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchCounts:
    """Logical ranks in few slots."""

    slots: int
    """Ranks that ran at a time."""
    switches: int
    """How often a rank was resumed that had given its slot to another."""
