"""Points on a real Ray cluster of two nodes on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from prismscale.errors import UsageError
from prismscale.explore.figures import Asked
from prismscale.explore.points import SweepPoint
from prismscale.explore.ray_points import OnNode, passed_on, run_on_node
from prismscale.explore.tasks import PointTask
from support.explored_program import NULL, by_label, write_explored
from support.runs import Ended, command, environment, eventually, prismscale

VARY = ("--vary", "--tp {1,2,3}", "--vary", "RATE={1,2}")


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    """A head and a worker node, one core each."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_explored(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, script: Path) -> Path:
    """The sweep as it is on one machine."""
    out = tmp_path_factory.mktemp("local") / "sweep"
    assert explore(out, script).code == 0
    return out


def explore(out: Path, script: Path, *more: str) -> Ended:
    return prismscale("explore", *NULL, "--out", out, *VARY, *more, "--", script)


def figures(out: Path, row: dict[str, Any]) -> dict[str, Any]:
    """What a run found out, but for what it cost."""
    found = json.loads((out / row["folder"] / "results.json").read_text())
    return {k: v for k, v in found.items() if k not in ("wall_s", "peak_rss_bytes")}


def test_a_node_that_is_lost_changes_nothing(
    two_nodes: Cluster, script: Path, local: Path, tmp_path: Path
) -> None:
    """It is killed while it runs points: the sweep ends whole, with the tables of a local one byte
    for byte, and run folders that hold the same."""
    out = tmp_path / "sweep"
    lost = two_nodes.add_node(num_cpus=2)
    on_ray = ("--executor", "ray", "--address", two_nodes.address)
    run = subprocess.Popen(
        command("explore", *NULL, "--out", out, *VARY, *on_ray, "--", script),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not list(out.glob("points/*.json")):
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.1)
    two_nodes.remove_node(lost, allow_graceful=False)
    said, _ = run.communicate(timeout=1200)
    assert run.returncode == 0, said
    for name in ("explore.json", "explore.csv"):
        assert (out / name).read_bytes() == (local / name).read_bytes()
    for row in by_label(local).values():
        if row["status"] == "done":
            assert figures(out, row) == figures(local, row)
    # What came back is a sweep like any other: in the same environment nothing is run again.
    before = {p: p.stat().st_mtime_ns for p in out.glob("points/*.json")}
    again = command("explore", *NULL, "--out", out, *VARY, "--", script)
    subprocess.run(again, env=environment(), check=True, capture_output=True)
    assert {p: p.stat().st_mtime_ns for p in out.glob("points/*.json")} == before


def test_a_killed_command_leaves_no_folder_on_a_node(
    two_nodes: Cluster, script: Path, tmp_path: Path
) -> None:
    """Ray kills the workers that ran its points; their temporary folders go all the same."""
    before, in_memory = point_folders(), left_in_memory()
    on_ray = ("--executor", "ray", "--address", two_nodes.address)
    run = subprocess.Popen(
        command("explore", *NULL, "--out", tmp_path / "sweep", *VARY, *on_ray, "--", script),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert eventually(lambda: bool(point_folders() - before))
    run.kill()
    run.wait()
    assert eventually(lambda: not point_folders() - before)
    assert eventually(lambda: not left_in_memory() - in_memory)


def point_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("prismscale-point-*"))


def left_in_memory() -> set[Path]:
    """Folders in shared memory whose process is gone: ``prismscale-PID-…``."""
    folders = Path("/dev/shm").glob("prismscale-*-*")
    return {f for f in folders if not Path("/proc", f.name.split("-")[1]).exists()}


def test_nodes_get_what_programs_read_and_no_secrets() -> None:
    """Of the environment in which the command was given."""
    given = {"NCCL_ALGO": "Ring", "PYTHONPATH": "/x", "TORCH_LOGS": "x", "AWS_SECRET": "…"}
    assert passed_on(given) == {k: v for k, v in given.items() if k != "AWS_SECRET"}


def test_a_cluster_that_is_not_there_is_named(script: Path, tmp_path: Path) -> None:
    """Before a point is lost on it."""
    done = explore(tmp_path / "out", script, "--executor", "ray", "--address", "127.0.0.1:1")
    assert done.code == 2
    assert "no Ray cluster at '127.0.0.1:1'" in done.err


def test_the_working_folder_must_be_on_every_node(tmp_path: Path) -> None:
    """A node that lacks it says so, with its own name."""
    shared = OnNode(working=str(tmp_path / "gone"), environment={}, n_places=1)
    point = SweepPoint(values={"tp": "1"}, arguments=())
    task = PointTask(point=point, key="", device="null", preload=(), folder=Path("point"))
    with pytest.raises(UsageError, match=f"node {os.uname().nodename} has no folder"):
        run_on_node(shared, task, Asked())
