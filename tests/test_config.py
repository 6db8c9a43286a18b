"""What a run is asked to do, and when its earlier stages can be used again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prismscale.cluster import Cluster
from prismscale.config import MAX_WORLD_SIZE, JobConfig
from prismscale.emulation.script import Script
from prismscale.errors import UsageError
from support.runs import write_program


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    script = write_program(tmp_path / "program")
    return JobConfig(
        script=Script(target=str(script)), world_size=16, cluster="h100-sxm", out=tmp_path / "run"
    )


@pytest.fixture
def cluster() -> Cluster:
    return Cluster.load("h100-sxm")


@pytest.mark.parametrize("world_size", [0, MAX_WORLD_SIZE + 1])
def test_impossible_worlds_are_refused(config: JobConfig, world_size: int) -> None:
    """With what is allowed."""
    with pytest.raises(UsageError, match="allowed: 1"):
        replace(config, world_size=world_size)


def test_a_world_must_fill_its_nodes(config: JobConfig) -> None:
    """8 devices a node: 20 ranks do not."""
    with pytest.raises(UsageError, match="does not fill nodes of 8"):
        replace(config, world_size=20).load_cluster()


def test_the_same_job_has_the_same_key(config: JobConfig, cluster: Cluster) -> None:
    """Also for another folder or other live ranks."""
    key = config.capture_key(cluster)
    assert replace(config, live=(3,), out=Path("elsewhere")).capture_key(cluster) == key


@pytest.mark.parametrize(
    "change",
    [{"world_size": 32}, {"samples": 9}, {"step_marker": "a:b"}, {"memory": False}],
    ids=lambda c: next(iter(c)),
)
def test_captures_of_another_measurement_are_not_used(
    config: JobConfig, cluster: Cluster, change: dict[str, int]
) -> None:
    """World, samples, marker and memory change what is captured."""
    assert replace(config, **change).capture_key(cluster) != config.capture_key(cluster)


def test_other_prices_are_captured_anew(config: JobConfig, cluster: Cluster) -> None:
    """A null device's trace holds what its kernels cost."""
    null = replace(config, device="null")
    assert replace(null, fused=True).capture_key(cluster) != null.capture_key(cluster)


@pytest.mark.parametrize("change", [{"fused": True}, {"kernels": Path("kernels.json")}])
def test_prices_are_a_null_devices(config: JobConfig, change: dict[str, object]) -> None:
    """A processor's kernels cost what they take."""
    with pytest.raises(UsageError, match="--device null, not of cpu"):
        replace(config, **change)


def test_kernel_times_are_read_before_anything_starts(config: JobConfig) -> None:
    """No such file is no such job."""
    null = replace(config, device="null", kernels=Path("nowhere.json"))
    with pytest.raises(UsageError, match=r"cannot read kernel table '.*nowhere.json'"):
        null.load_cluster()


def test_an_edited_program_is_captured_anew(config: JobConfig, cluster: Cluster) -> None:
    """Also where only a file beside the script changed."""
    key = config.capture_key(cluster)
    (Path(config.script.target).parent / "marker.py").write_text("changed = True\n")
    assert config.capture_key(cluster) != key


def test_an_edited_package_beside_the_script_is_captured_anew(
    config: JobConfig, cluster: Cluster
) -> None:
    """However deep the file lies."""
    inner = Path(config.script.target).parent / "models" / "parts"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").touch()
    key = config.capture_key(cluster)
    (inner / "layer.py").write_text("wide = True\n")
    assert config.capture_key(cluster) != key


def test_an_edited_module_is_captured_anew(
    config: JobConfig, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is found from where the command runs; none of it is run for that."""
    package = tmp_path / "trainer_of_ours"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    module = replace(config, script=Script(target="trainer_of_ours.train", is_module=True))
    key = module.capture_key(cluster)
    (package / "train.py").write_text("print('steps')\n")
    assert module.capture_key(cluster) != key


@pytest.mark.parametrize(
    "change",
    [{"live": (1,)}, {"steps": 3}, {"clock": "virtual"}, {"slow": {1: 2.0}}, {"hang": {1: 2}}],
    ids=lambda c: next(iter(c)),
)
def test_observations_of_another_live_run_are_not_used(
    config: JobConfig, cluster: Cluster, change: dict[str, object]
) -> None:
    """Who is live, how long, on which clock, with which faults, and on which cluster."""
    assert replace(config, **change).live_key(cluster) != config.live_key(cluster)
    assert config.live_key(Cluster.load("a100-80g")) != config.live_key(cluster)
