"""What the coordinator's process is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from prismscale.durations.faults import Faults


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorSpec:
    """The job that live ranks are in."""

    graph: str
    """Folder of the graph."""
    cluster: str
    """Preset or file."""
    live: tuple[int, ...]
    socket: str
    """Where it is to listen."""
    faults: Faults = field(default_factory=Faults)
    compute_scale: float = 1.0
    what_ifs: tuple[str, ...] = ()
    """What is to be otherwise; the graph is so already."""
    follow_speed: bool = False
    """Virtual ranks are as fast or slow as this machine is at the moment."""
