"""What a captured rank's process is told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from prismscale.analysis.memory.memory_log import memory_path
from prismscale.devices.rank_spec import RankSpec
from prismscale.durations.recosting import launches_path, trace_path
from prismscale.errors import UsageError

DEVICES = ("cpu", "cuda", "null")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec(RankSpec):
    """One captured rank; ``out`` takes ``rank-<r>.parquet`` or ``rank-<r>.error.json``."""

    WHAT = "captured rank"
    PROCESS = "prismscale.capture.captured_rank"

    samples: int
    """Steady steps to measure."""
    track_memory: bool
    slice: tuple[int, ...] = ()
    """Ranks that run beside this one, itself among them, and communicate with it for real; empty
    for a rank that runs alone. They share ``out``."""
    watched_steps: int = 0
    """Steps of the program to see at least, where time is modelled: for what happens only now and
    then."""
    least_steps: int = 2
    """Equal steps that a program must have made when it ends; 1 where only its memory counts."""
    tells_first_message: bool = False
    """Whether the rank writes :attr:`first_message_path` as soon as it can."""
    whole: bool = False
    """Whether the rank runs on where it has repeated another's first steps."""
    marks: int = 0
    """Of a slice: optimizer calls to make."""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UsageError(f"device {self.device!r}; allowed: {', '.join(DEVICES)}")
        if self.samples < 1:
            raise UsageError(f"samples is {self.samples}; at least 1 step must be measured")
        if self.least_steps not in (1, 2):
            raise UsageError(f"least_steps is {self.least_steps}; allowed: 1, 2")

    @property
    def path(self) -> Path:
        """Where this is kept while the rank is captured."""
        return Path(self.out) / f"rank-{self.rank}.json"

    def is_captured_now(self, rank: int) -> bool:
        """Whether ``rank`` is being captured, beside this one."""
        other = replace(self, rank=rank)
        ended = other.trace_path.exists() or other.error_path.exists()
        return other.path.exists() and not ended

    def may_be_told(self) -> bool:
        """Whether what the first rank tells may still come: its program has not failed."""
        return not replace(self, rank=0).error_path.exists()

    @property
    def trace_path(self) -> Path:
        """Where the trace goes."""
        return trace_path(Path(self.out), self.rank)

    @property
    def first_message_path(self) -> Path:
        """Where a rank's groups and its first send or receive go, before its program ends."""
        return Path(self.out) / f"first-message-{self.rank}.parquet"

    @property
    def unusual_path(self) -> Path:
        """Where what happened now and then goes, if anything did."""
        return unusual_path(Path(self.out), self.rank)

    @property
    def launches_path(self) -> Path:
        """Where a null device's launches of the ordinary step go."""
        return launches_path(Path(self.out), self.rank)

    @property
    def emulated_path(self) -> Path:
        """Where a null device says what it ran and which values it made up."""
        return Path(self.out) / f"rank-{self.rank}.null.json"

    @property
    def memory_path(self) -> Path:
        """Where what happened to a null device's memory goes."""
        return memory_path(Path(self.out), self.rank)

    @property
    def payload_path(self) -> Path:
        """Where it is said what absent peers contributed from where."""
        return payload_path(Path(self.out), self.rank)

    @property
    def routers_path(self) -> Path:
        """Where it is said what routers of experts chose, on a device that computes."""
        return routers_path(Path(self.out), self.rank)

    @property
    def error_path(self) -> Path:
        """Where a failure is described."""
        return Path(self.out) / f"rank-{self.rank}.error.json"


def payload_path(folder: Path, rank: int) -> Path:
    """Where it is said from where a captured rank had what absent peers contribute."""
    return folder / f"rank-{rank}.payload.json"


def routers_path(folder: Path, rank: int) -> Path:
    """Where it is said what a captured rank's routers of experts chose."""
    return folder / f"rank-{rank}.routers.json"


def unusual_path(folder: Path, rank: int) -> Path:
    """Where what a captured rank did now and then goes, if it did anything."""
    return folder / f"unusual-{rank}.parquet"
