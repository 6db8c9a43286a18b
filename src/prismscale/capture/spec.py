"""What a captured rank's process is told, as a JSON file: nothing is pickled between processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prismscale.capture.environment import RankEnvironment
from prismscale.capture.script import Script
from prismscale.errors import FormatError, UsageError
from prismscale.files import write_json

DEVICES = ("cpu", "cuda", "null")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureSpec:
    """One captured rank."""

    rank: int
    world_size: int
    local_world_size: int
    target: str
    is_module: bool
    args: tuple[str, ...]
    device: str
    samples: int
    """Steady steps to measure."""
    step_marker: str | None
    track_memory: bool
    communication_load: bool
    """Do this rank's share of communication work on the local cores."""
    payloads: str
    """Folder of recorded payloads, shared by all captures of a job."""
    out: str
    """Folder for ``rank-<r>.parquet`` or ``rank-<r>.error.json``."""
    gpu: str = ""
    """Name of the GPU that a null device pretends to be."""
    gpu_memory_bytes: int = 0

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UsageError(f"device {self.device!r}; allowed: {', '.join(DEVICES)}")
        if self.samples < 1:
            raise UsageError(f"samples is {self.samples}; at least 1 step must be measured")

    @property
    def script(self) -> Script:
        """The program."""
        return Script(target=self.target, args=self.args, is_module=self.is_module)

    @property
    def environment(self) -> RankEnvironment:
        """The environment variables that torchrun would set."""
        return RankEnvironment(
            rank=self.rank,
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            shares_device=self.device == "cuda",
        )

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

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`StorageError`."""
        write_json(path, asdict(self))

    @staticmethod
    def load(path: Path) -> CaptureSpec:
        """Read what :meth:`save` wrote.

        Raises:
            FormatError: not such a file.
        """
        try:
            fields: dict[str, Any] = json.loads(path.read_text())
            fields["args"] = tuple(fields["args"])
            return CaptureSpec(**fields)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise FormatError(f"{path} does not describe a captured rank: {error}") from error
