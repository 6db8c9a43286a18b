"""The specification file of the coordinator's process."""

from __future__ import annotations

from dataclasses import dataclass, field

from prismscale.durations.faults import Faults


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorSpec:
    """The job that the coordinator replays around the live ranks."""

    graph: str
    """Folder of the graph."""
    cluster: str
    """Name of a preset, or path of a cluster file."""
    live: tuple[int, ...]
    socket: str
    """Path of the socket on which the coordinator listens."""
    faults: Faults = field(default_factory=Faults)
    compute_scale: float = 1.0
    what_ifs: tuple[str, ...] = ()
    """The run's what-ifs. They are already applied to the graph."""
    follow_speed: bool = False
    """Let virtual ranks compute as fast or slow as this machine does at the moment."""
