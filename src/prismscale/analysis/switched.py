"""Statistics of a run in which ranks exchange real values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchCounts:
    """Counts for logical ranks that share slots."""

    slots: int
    """Number of ranks that run at a time."""
    switches: int
    """How often a rank was resumed after it had given its slot to another rank."""
    budget_bytes: int = 0
    """Memory budget of all ranks; 0: unlimited."""
    presses: int = 0
    """How often the memory of a suspended rank was written out to disk."""
