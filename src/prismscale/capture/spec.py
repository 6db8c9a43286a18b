"""What a captured rank's process is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prismscale.capture.rank_spec import RankSpec
from prismscale.errors import UsageError

DEVICES = ("cpu", "cuda", "null")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec(RankSpec):
    """One captured rank; ``out`` takes ``rank-<r>.parquet`` or ``rank-<r>.error.json``."""

    WHAT = "captured rank"

    samples: int
    """Steady steps to measure."""
    track_memory: bool

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UsageError(f"device {self.device!r}; allowed: {', '.join(DEVICES)}")
        if self.samples < 1:
            raise UsageError(f"samples is {self.samples}; at least 1 step must be measured")

    @property
    def trace_path(self) -> Path:
        """Where the trace goes."""
        return Path(self.out) / f"rank-{self.rank}.parquet"

    @property
    def emulated_path(self) -> Path:
        """Where a null device says what it ran and which values it made up."""
        return Path(self.out) / f"rank-{self.rank}.null.json"

    @property
    def error_path(self) -> Path:
        """Where a failure is described."""
        return Path(self.out) / f"rank-{self.rank}.error.json"
