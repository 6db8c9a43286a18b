"""The specification of a live rank's process, and the modules of the other processes."""

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
    """Facts about a job that had begun before the program replaced itself (``os.exec``)."""

    connection: int
    """Descriptor of the connection to the coordinator."""
    origin_ns: int
    """Time at which the job began, on the monotonic clock."""
    others: tuple[int, ...]
    """Process ids of the emulation's other processes."""


LogLine = Callable[[int, str], None]
"""Called with ``(rank, line)`` for each line of a live rank's own output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveSpec(RankSpec):
    """One live rank. It leaves ``live-<r>.json`` or ``live-<r>.error.json`` in ``out``."""

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
    """Path of the socket on which the coordinator listens."""
    compute_factor: float = 1.0
    """Factor on the time that this rank's computation takes on this machine."""
    attached: bool = False
    """This rank has the command's terminal: ``breakpoint()`` asks there."""
    hang_step: int | None = None
    """Steady step at whose beginning this rank stops for ever."""
    recordings: str = ""
    """Folder of recorded communications; empty if none are to be used."""
    objects_are_recorded: bool = False
    """The recording has all object collectives, so nothing stands in for them."""
    transfers: TransferSettings = field(default_factory=TransferSettings)
    live_on: tuple[int, ...] = ()
    """The core or GPU of each live rank; empty: wherever there is room."""
    what_ifs: tuple[str, ...] = ()
    """What-ifs of the run: see :mod:`prismscale.durations.what_if.forms`."""

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
        """File of the observations."""
        return Path(self.out) / f"live-{self.rank}.json"

    @property
    def error_path(self) -> Path:
        """File that describes a failure."""
        return Path(self.out) / f"live-{self.rank}.error.json"


def refuse_virtual_gpu(clock: str, device: str) -> None:
    """Refuse a virtual clock on a GPU.

    Raises:
        UsageError: the two are asked for together.
    """
    if clock == "virtual" and device == "cuda":
        raise UsageError(
            "--clock virtual skips waits, and a GPU computes in real time: use --clock paced "
            "with --device cuda, or --device cpu"
        )


def refuse_unfelt(hoped: WhatIfs, live: Sequence[int], device: str) -> None:
    """Refuse what-ifs that cannot take effect on live ranks.

    A live rank on a GPU computes at the GPU's own speed, so its computation cannot be changed.
    What runs beside what is known only from a whole step, which live ranks have not made yet.

    Raises:
        UsageError: there is such a what-if.
    """
    if (hoped.shares_links or hoped.shares_compute) and live:
        raise UsageError(
            "--what-if 'links=shared' and 'compute=shared' with --live: what runs beside what is "
            "known of a simulated step only. Leave out --live"
        )
    if device != "cuda" or not live:
        return
    if hoped.kernels or hoped.overlaps or not hoped.recomputes:
        raise UsageError(
            "--what-if on kernels, overlap or recomputation with --live and --device cuda: the "
            "program computes there as it is written. Leave out --live, or take --device null"
        )
