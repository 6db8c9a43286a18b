"""What a live rank's process is told, as a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from prismscale.capture.environment import RankEnvironment
from prismscale.capture.script import Script
from prismscale.errors import FormatError, UsageError
from prismscale.files import write_json

CLOCKS = ("paced", "virtual")


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveSpec:
    """One live rank."""

    rank: int
    world_size: int
    local_world_size: int
    target: str
    is_module: bool
    args: tuple[str, ...]
    device: str
    steps: int
    """Steady steps to run before the program is stopped."""
    step_marker: str | None
    clock: str
    live: tuple[int, ...]
    """All live ranks."""
    trace: str
    """File of the trace that this rank follows."""
    payloads: str
    """Folder of recorded payloads."""
    exchange: str
    """Folder in shared memory for tensors between live ranks."""
    communication_load: bool
    """Do this rank's share of communication work on the local cores."""
    socket: str
    """Where the coordinator listens."""
    gate: str | None
    """Socket of a keeper that lets steps begin; None lets them run."""
    out: str
    """Folder for ``live-<r>.json`` or ``live-<r>.error.json``."""
    compute_factor: float = 1.0
    """How much longer this rank computes than it does here."""
    hang_step: int | None = None
    """Steady step at whose beginning this rank stops for ever."""
    gpu: str = ""
    """Name of the GPU that a null device pretends to be."""
    gpu_memory_bytes: int = 0

    def __post_init__(self) -> None:
        if self.clock not in CLOCKS:
            raise UsageError(f"clock {self.clock!r}; allowed: {', '.join(CLOCKS)}")
        refuse_virtual_gpu(self.clock, self.device)

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
    def result_path(self) -> Path:
        """Where the observations go."""
        return Path(self.out) / f"live-{self.rank}.json"

    @property
    def error_path(self) -> Path:
        """Where a failure is described."""
        return Path(self.out) / f"live-{self.rank}.error.json"

    def save(self, path: Path) -> None:
        """Write as JSON. Raises :class:`StorageError`."""
        write_json(path, asdict(self))

    @staticmethod
    def load(path: Path) -> LiveSpec:
        """Read what :meth:`save` wrote.

        Raises:
            FormatError: not such a file.
        """
        try:
            fields = json.loads(path.read_text())
            fields["args"], fields["live"] = tuple(fields["args"]), tuple(fields["live"])
            return LiveSpec(**fields)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise FormatError(f"{path} does not describe a live rank: {error}") from error


def refuse_virtual_gpu(clock: str, device: str) -> None:
    """A GPU has no virtual clock.

    Raises:
        UsageError: the two are asked for together.
    """
    if clock == "virtual" and device == "cuda":
        raise UsageError(
            "--clock virtual skips waits, and a GPU computes in real time: use --clock paced "
            "with --device cuda, or --device cpu"
        )
