"""What a live rank's process is told, and which processes the live stage has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prismscale.devices.rank_spec import RankSpec
from prismscale.durations.what_if.combined import WhatIfs
from prismscale.errors import UsageError
from prismscale.transfers.transfer_settings import TransferSettings

CLOCKS = ("paced", "virtual")
COORDINATOR_PROCESS = "prismscale.live.coordinator.coordinator_process"
ASSISTANT_PROCESS = "prismscale.transfers.assistants"


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """A job that has begun for this process: its program was replaced by another one."""

    connection: int
    """Descriptor of the connection to the coordinator."""
    origin_ns: int
    """When it began, on the monotonic clock."""
    others: tuple[int, ...]
    """Processes that emulation runs beside this one."""


LogLine = Callable[[int, str], None]
"""``(rank, line)`` of a live rank's own output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveSpec(RankSpec):
    """One live rank; ``out`` takes ``live-<r>.json`` or ``live-<r>.error.json``."""

    WHAT = "live rank"
    PROCESS = "prismscale.live.live_rank"

    steps: int
    """Steady steps to run before the program is stopped."""
    clock: str
    live: tuple[int, ...]
    """All live ranks."""
    trace: str
    """File of the trace that this rank follows."""
    exchange: str
    """Folder in shared memory for tensors between live ranks."""
    socket: str
    """Where the coordinator listens."""
    compute_factor: float = 1.0
    """How much longer this rank computes than it does here."""
    attached: bool = False
    """This rank has the command's terminal: ``breakpoint()`` asks there."""
    hang_step: int | None = None
    """Steady step at whose beginning this rank stops for ever."""
    recordings: str = ""
    """Folder of recorded communications; empty: none are asked for."""
    objects_are_recorded: bool = False
    """Object collectives are all in the recording: nothing stands in for them."""
    transfers: TransferSettings = field(default_factory=TransferSettings)
    live_on: tuple[int, ...] = ()
    """The core or GPU of each live rank; empty: wherever there is room."""
    what_ifs: tuple[str, ...] = ()
    """What is to be otherwise: see :mod:`prismscale.durations.what_if.forms`."""

    begun: Begun | None = None

    def __post_init__(self) -> None:
        if self.begun is not None and self.transfers.are_real:
            raise UsageError(
                "the program put another in the place of its process (os.exec): transfers between "
                "live ranks do not outlive that. Leave out --transfers"
            )
        if self.clock not in CLOCKS:
            raise UsageError(f"clock {self.clock!r}; allowed: {', '.join(CLOCKS)}")
        refuse_virtual_gpu(self.clock, self.device)

    @property
    def result_path(self) -> Path:
        """Where the observations go."""
        return Path(self.out) / f"live-{self.rank}.json"

    @property
    def error_path(self) -> Path:
        """Where a failure is described."""
        return Path(self.out) / f"live-{self.rank}.error.json"


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


def refuse_unfelt(hoped: WhatIfs, live: Sequence[int], device: str) -> None:
    """A live rank on a GPU computes as it does: nothing of it can be made faster. Which groups
    share a link is told by a whole step, which live ranks have not made yet.

    Raises:
        UsageError: a what-if that live ranks would have to feel, and cannot.
    """
    if hoped.shares_links and live:
        raise UsageError(
            "--what-if 'links=shared' with --live: what communicates beside what is known of a "
            "simulated step only. Leave out --live"
        )
    if device != "cuda" or not live:
        return
    if hoped.kernels or hoped.overlaps or not hoped.recomputes:
        raise UsageError(
            "--what-if on kernels, overlap or recomputation with --live and --device cuda: the "
            "program computes there as it is written. Leave out --live, or take --device null"
        )
