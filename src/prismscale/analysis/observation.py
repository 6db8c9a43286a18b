"""What was seen of a live rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from prismscale.analysis.moved import Moved
from prismscale.analysis.payload_use import PayloadUse


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The contents of ``live-<r>.json``. Steps are steady ones, in order."""

    rank: int
    step_end_ns: tuple[int, ...]
    """Logical time at the end of each step."""
    step_wait_ns: tuple[int, ...]
    """Logical time spent in waits, by step."""
    step_lag_ns: tuple[int, ...]
    """What the emulation cost, by step; not in :attr:`step_end_ns`."""
    boot_s: float
    """From the start of the process to the program's first communication."""
    communications: int
    uncovered: int
    peak_bytes: int
    """0 where memory was not followed."""
    step_peak_bytes: tuple[int, ...] = ()
    reserved_bytes: int | None = None
    """Highest bytes held by the caching allocator, where there is one."""
    moved: Moved = field(default_factory=Moved)
    payloads: tuple[PayloadUse, ...] = ()
    """From where it had what absent peers contribute."""
