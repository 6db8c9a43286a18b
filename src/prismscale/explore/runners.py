"""Choice of the runner of points: this machine or a Ray cluster."""

from __future__ import annotations

from pathlib import Path

from prismscale.errors import UsageError
from prismscale.explore.local_points import LocalPoints
from prismscale.explore.ray_points import RayPoints
from prismscale.explore.tasks import PointRunner
from prismscale.processes.starter import cores


def runner_named(
    name: str, *, logs: Path, workers: int | None = None, address: str | None = None
) -> PointRunner:
    """Return the runner that a command line asks for.

    Args:
        name: ``local``, ``serial`` or ``ray``.
        logs: folder for the output of processes.
        workers: number of ranks that run side by side; None: one per core.
        address: address of the Ray cluster.

    Raises:
        UsageError: there is no runner of this name.
    """
    if name in ("local", "serial"):
        count = 1 if name == "serial" else workers
        return LocalPoints(logs=logs, workers=cores() if count is None else count)
    if name == "ray":
        return RayPoints(address=address, workers=workers)
    raise UsageError(f"unknown executor '{name}'; allowed: local, ray, serial")
