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
    budget_bytes: int = 0
    """Memory that all ranks might take; 0: what they needed."""
    presses: int = 0
    """How often the memory of a suspended rank was pressed out to disk."""
