"""Whether this process may use its cores only for a share of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

MEMBERSHIP = Path("/proc/self/cgroup")
MOUNTS = Path("/proc/self/mounts")


def is_cpu_limited(membership: Path = MEMBERSHIP, mounts: Path = MOUNTS) -> bool:
    """Whether a control group of this process, or one above it that can be seen, has a CPU quota.
    False where there are no control groups."""
    with suppress(OSError):
        return any(_has_quota(group) for group in _groups(membership, mounts))
    return False


def _groups(membership: Path, mounts: Path) -> Iterator[Path]:
    """Control groups of the ``cpu`` controller (version 1 or 2), innermost first."""
    places = dict(_cpu_mounts(mounts))
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version = 1 if "cpu" in controllers.split(",") else 2 if not controllers else 0
        if version in places:
            inside = PurePosixPath(path).relative_to("/")
            # A container sees its own group as the mount's root, whatever its path is called.
            yield from (places[version] / part for part in (inside, *inside.parents))


def _cpu_mounts(mounts: Path) -> Iterator[tuple[int, Path]]:
    """``(version, place)`` of each hierarchy that may hold the ``cpu`` controller."""
    for line in mounts.read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            yield 1, Path(place)
        elif kind == "cgroup2":
            yield 2, Path(place)


def _has_quota(group: Path) -> bool:
    with suppress(OSError):
        return (group / "cpu.max").read_text().split()[0] != "max"
    with suppress(OSError):
        return int((group / "cpu.cfs_quota_us").read_text()) > 0
    return False
