"""Whether a CPU quota is seen, in both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from prismscale.capture.quota import is_cpu_limited


def limited(folder: Path, kind: str, membership: str, files: dict[str, str]) -> bool:
    """What is found where the hierarchy is mounted at ``folder``/root and has ``files``."""
    root = folder / "root"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (folder / "mounts").write_text(f"cgroup {root} {kind} rw,relatime,cpu 0 0\n")
    (folder / "membership").write_text(membership)
    return is_cpu_limited(folder / "membership", folder / "mounts")


@pytest.mark.parametrize(
    ("quota", "found"), [("max 100000", False), ("50000 100000", True)], ids=["none", "half"]
)
def test_a_quota_of_version_2_is_seen(tmp_path: Path, quota: str, found: bool) -> None:
    """In the process's own group."""
    assert limited(tmp_path, "cgroup2", "0::/job\n", {"job/cpu.max": quota}) is found


@pytest.mark.parametrize(("quota", "found"), [("-1", False), ("4000", True)], ids=["none", "some"])
def test_a_quota_of_version_1_is_seen(tmp_path: Path, quota: str, found: bool) -> None:
    """As a number of microseconds, below 0 where there is none."""
    files = {"job/cpu.cfs_quota_us": quota}
    assert limited(tmp_path, "cgroup", "3:cpu,cpuacct:/job\n", files) is found


def test_a_quota_of_a_group_above_counts(tmp_path: Path) -> None:
    """In a container that is the mount's root, and the path is of another namespace."""
    assert limited(tmp_path, "cgroup2", "0::/a/b\n", {"cpu.max": "200000 100000"})


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    """Other systems have no such files."""
    assert not is_cpu_limited(tmp_path / "membership", tmp_path / "mounts")
