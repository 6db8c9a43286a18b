"""Specification for the process of a rank that runs with real values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prismscale.capture.capture_spec import CaptureSpec
from prismscale.payload.recordings.blob_store import LIMIT_BYTES
from prismscale.payload.recordings.selection import recordings_of


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchedSpec(CaptureSpec):
    """Spec of one rank. It ends after ``marks`` optimizer calls."""

    WHAT = "rank with real values"
    PROCESS = "prismscale.switching.switched_rank"

    address: str
    """Address of the coordinator's socket."""
    values: str
    """Folder for values under way, shared by all ranks of the job."""
    record: tuple[str, ...] = ()
    """Selections to record for live ranks; see :mod:`prismscale.payload.recordings.selection`."""
    record_limit_bytes: int = LIMIT_BYTES
    """Size limit of all recordings together."""
    spilled_bytes: int = 0
    """Most bytes of the rank's memory in a file in the folder of values; 0: no file is used."""

    @property
    def stopped_path(self) -> Path:
        """File that exists if the rank was stopped after all wanted steps."""
        return Path(self.out) / f"rank-{self.rank}.stopped"

    @property
    def recordings(self) -> Path:
        """Folder of recordings."""
        return recordings_of(Path(self.out))
