"""What was observed of a live rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from prismscale.analysis.moved import Moved
from prismscale.analysis.payload_use import PayloadUse


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The contents of ``live-<r>.json``. Steps are steady steps, in order."""

    rank: int
    step_end_ns: tuple[int, ...]
    """Logical time at the end of each step."""
    step_wait_ns: tuple[int, ...]
    """Logical time spent waiting, by step."""
    step_lag_ns: tuple[int, ...]
    """Cost of the emulation, by step; not contained in :attr:`step_end_ns`."""
    boot_s: float
    """From the start of the process to the program's first communication."""
    communications: int
    uncovered: int
    peak_bytes: int
    """0 where memory was not tracked."""
    step_peak_bytes: tuple[int, ...] = ()
    reserved_bytes: int | None = None
    """Highest bytes held by the caching allocator, where there is one."""
    moved: Moved = field(default_factory=Moved)
    payloads: tuple[PayloadUse, ...] = ()
    """Sources of the contributions of absent peers."""
