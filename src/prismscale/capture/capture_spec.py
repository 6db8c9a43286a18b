"""The settings that are passed to the process of a captured rank."""

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
    """Settings of one captured rank, which writes a trace or an error file to ``out``.

    The files are ``rank-<r>.parquet`` and ``rank-<r>.error.json``.
    """

    WHAT = "captured rank"
    PROCESS = "prismscale.capture.captured_rank"

    samples: int
    """Steady steps to measure."""
    track_memory: bool
    slice: tuple[int, ...] = ()
    """Ranks that run side by side and really communicate with each other, this one included.

    They share ``out``. Empty for a rank that runs alone."""
    watched_steps: int = 0
    """Least number of steps to run where time is modelled, so that periodic events are seen."""
    least_steps: int = 2
    """Equal steps that a program must have made when it ends; 1 if only its memory counts."""
    tells_first_message: bool = False
    """Whether the rank writes :attr:`first_message_path` as soon as it can."""
    whole: bool = False
    """Whether the rank continues when its first steps have been the same as another rank's."""
    marks: int = 0
    """Number of optimizer calls after which a rank of a slice stops."""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UsageError(f"device {self.device!r}; allowed: {', '.join(DEVICES)}")
        if self.samples < 1:
            raise UsageError(f"samples is {self.samples}; at least 1 step must be measured")
        if self.least_steps not in (1, 2):
            raise UsageError(f"least_steps is {self.least_steps}; allowed: 1, 2")

    @property
    def path(self) -> Path:
        """The file that holds this specification while the rank is captured."""
        return Path(self.out) / f"rank-{self.rank}.json"

    def is_captured_now(self, rank: int) -> bool:
        """Whether ``rank`` is being captured at the same time as this one."""
        other = replace(self, rank=rank)
        ended = other.trace_path.exists() or other.error_path.exists()
        return other.path.exists() and not ended

    def may_be_told(self) -> bool:
        """Whether rank 0 may still tell the other ranks something: its program has not failed."""
        return not replace(self, rank=0).error_path.exists()

    @property
    def trace_path(self) -> Path:
        """The file of the trace."""
        return trace_path(Path(self.out), self.rank)

    @property
    def first_message_path(self) -> Path:
        """The file of the rank's groups and first send or receive, written while it runs."""
        return Path(self.out) / f"first-message-{self.rank}.parquet"

    @property
    def unusual_path(self) -> Path:
        """The file of the rank's unusual steps, if it had any."""
        return unusual_path(Path(self.out), self.rank)

    @property
    def launches_path(self) -> Path:
        """The file of a null device's launches in the ordinary step."""
        return launches_path(Path(self.out), self.rank)

    @property
    def emulated_path(self) -> Path:
        """The file in which a null device lists the kernels it ran and the values it made up."""
        return Path(self.out) / f"rank-{self.rank}.null.json"

    @property
    def memory_path(self) -> Path:
        """The file of a null device's memory history."""
        return memory_path(Path(self.out), self.rank)

    @property
    def payload_path(self) -> Path:
        """The file that says where the values came from that absent peers contributed."""
        return payload_path(Path(self.out), self.rank)

    @property
    def routers_path(self) -> Path:
        """The file of the choices that routers of experts made, on a device that computes."""
        return routers_path(Path(self.out), self.rank)

    @property
    def error_path(self) -> Path:
        """The file that describes a failure of the rank."""
        return Path(self.out) / f"rank-{self.rank}.error.json"


def payload_path(folder: Path, rank: int) -> Path:
    """Return the file that says where the values of absent peers came from on a captured rank."""
    return folder / f"rank-{rank}.payload.json"


def routers_path(folder: Path, rank: int) -> Path:
    """Return the file of the choices that a captured rank's routers of experts made."""
    return folder / f"rank-{rank}.routers.json"


def unusual_path(folder: Path, rank: int) -> Path:
    """Return the file of a captured rank's unusual steps, which exists if it had any."""
    return folder / f"unusual-{rank}.parquet"
