"""What the process of a rank that runs with real values is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prismscale.capture.capture_spec import CaptureSpec
from prismscale.payload.recordings.blob_store import LIMIT_BYTES
from prismscale.payload.recordings.selection import recordings_of


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchedSpec(CaptureSpec):
    """One rank; ``marks`` says after how many optimizer calls it ends."""

    WHAT = "rank with real values"
    PROCESS = "prismscale.switching.switched_rank"

    address: str
    """Of the coordinator's socket."""
    values: str
    """Folder for values under way, shared by all ranks of the job."""
    record: tuple[str, ...] = ()
    """What is recorded for live ranks: see :mod:`prismscale.payload.recordings.selection`."""
    record_limit_bytes: int = LIMIT_BYTES
    """Of all recordings together."""
    spilled_bytes: int = 0
    """What of the rank's memory may lie in a file there; 0: none does."""

    @property
    def stopped_path(self) -> Path:
        """A file that is there when the rank was ended for having shown enough."""
        return Path(self.out) / f"rank-{self.rank}.stopped"

    @property
    def recordings(self) -> Path:
        """Folder of what is recorded."""
        return recordings_of(Path(self.out))
