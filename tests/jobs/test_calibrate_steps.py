"""``prismscale calibrate steps``: a cluster file from runs and what their jobs took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from prismscale.cluster import Cluster
from support.runs import Ended, prismscale, results

PROGRAM = """
import sys

import torch
from torch import nn

width, layers = map(int, sys.argv[1:])
layers = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(8):
    x = torch.randn(width, width, device="cuda", dtype=torch.bfloat16)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PROGRAMS = {"narrow": (256, 40), "wide": (8_192, 4)}
"""Width and layers: the host decides the first, the device the second."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of both programs."""
    root = tmp_path_factory.mktemp("calibrate")
    (root / "train.py").write_text(PROGRAM)
    for name in PROGRAMS:
        ran(root, name)
    return root


def ran(root: Path, name: str, *options: object, out: str = "") -> None:
    """``prismscale run`` on two GPUs that do not communicate."""
    where = ("--device", "null", "--world-size", 2, "--out", root / (out or name))
    done = prismscale("run", *where, *options, root / "train.py", *PROGRAMS[name])
    assert done.code == 0, done.err


def calibrated(root: Path, *measured: str, out: str = "ours.toml") -> Ended:
    """``prismscale calibrate steps``."""
    return prismscale("calibrate", "steps", *measured, "--out", root / out)


def shown_ns(root: Path, name: str) -> int:
    """The step that a run shows."""
    return int(results(root / name)["spread"]["p50_ns"])


def measured(root: Path, **factors: float) -> Sequence[str]:
    """Jobs that took so many times what their runs show."""
    return [f"{root / name}={shown_ns(root, name) / 1e6 * f}ms" for name, f in factors.items()]


def test_a_narrow_job_tells_the_host_and_a_wide_one_the_kernels(folder: Path) -> None:
    """A new run on the written cluster takes what was measured, and says what it rests on."""
    done = calibrated(folder, *measured(folder, narrow=1.7, wide=1.05))
    assert done.code == 0, done.err
    factors = Cluster.load(folder / "ours.toml").device.calibration
    assert factors is not None
    assert factors.host == pytest.approx(1.7, rel=0.05)
    assert factors.kernels == pytest.approx(1.05, rel=0.03)
    assert factors.steps == 2
    for name, factor in (("narrow", 1.7), ("wide", 1.05)):
        ran(folder, name, "--cluster", folder / "ours.toml", out=f"{name}-after")
        after = shown_ns(folder, f"{name}-after")
        assert after == pytest.approx(factor * shown_ns(folder, name), rel=0.03)
        sources = [s["source"] for s in results(folder / f"{name}-after")["sources"]]
        assert any("for ours, calibrated by 2 measured steps" in s for s in sources)


def test_the_first_screen_says_whose_pace_the_hosts_is(folder: Path) -> None:
    """In place of an assumed one; and what the step's error rests on."""
    done = calibrated(folder, *measured(folder, narrow=1.7), out="one-step.toml")
    assert done.code == 0, done.err
    where = ("--device", "null", "--world-size", 2, "--cluster", folder / "one-step.toml")
    shown = prismscale("run", *where, "--out", folder / "shown", folder / "train.py", 256, 40)
    text = " ".join(shown.out.split())
    assert "at the pace of 1 measured step;" in text
    assert "step calibrated by 1 measured one" in text


def test_what_is_told_is_what_a_forecast_and_a_new_run_show(folder: Path) -> None:
    """On the written cluster, to the last digit."""
    done = calibrated(folder, *measured(folder, narrow=1.3), out="one.toml")
    assert done.code == 0, done.err
    ran(folder, "narrow", "--cluster", folder / "one.toml", out="narrow-one")
    told = f"{shown_ns(folder, 'narrow-one') / 1e6:.4g} ms"
    assert told in done.out
    cluster = ("--cluster", folder / "one.toml", "--draws", 200)
    forecast = prismscale("forecast", folder / "narrow", *cluster)
    assert forecast.code == 0, forecast.err
    drawn = results(folder / "narrow")["forecast"]["step"]["quantiles_ns"]["0.5"]["value"]
    assert round(drawn) == shown_ns(folder, "narrow-one")


def test_a_job_that_the_device_decides_leaves_the_host_open(folder: Path) -> None:
    """It is said, and what would tell."""
    done = calibrated(folder, *measured(folder, wide=1.02), out="wide.toml")
    assert done.code == 0, done.err
    assert "no step tells" in done.out


def test_a_step_that_no_factor_explains_is_named(folder: Path) -> None:
    """Kernels do not take three times what a known GPU takes."""
    done = calibrated(folder, *measured(folder, wide=3.0), out="far.toml")
    assert done.code == 0, done.err
    assert "no factor explains" in done.out


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        ("narrow", 2, "give a run's folder and the step"),
        ("narrow=fast", 2, "give a run's folder and the step"),
        ("narrow=3", 2, "units: ms, s"),
        ("narrow=0s", 2, "give a run's folder and the step"),
        ("nowhere=3s", 2, "holds no finished run"),
    ],
)
def test_what_is_no_measured_step_is_refused(
    folder: Path, given: str, code: int, told: str
) -> None:
    """With an example; nothing is written."""
    done = calibrated(folder, f"{folder}/{given}", out="none.toml")
    assert done.code == code
    assert told in " ".join(done.err.split())
    assert not (folder / "none.toml").exists()


def test_runs_on_two_clusters_are_refused(folder: Path) -> None:
    """The file is one cluster's."""
    other = replace(Cluster.load("h100-sxm"), name="other", nics_per_node=4)
    (folder / "other.toml").write_text(other.to_toml())
    ran(folder, "wide", "--cluster", folder / "other.toml", out="elsewhere")
    done = calibrated(folder, f"{folder}/narrow=9ms", f"{folder}/elsewhere=9ms", out="none.toml")
    assert done.code == 2
    assert "on one cluster" in " ".join(done.err.split())


def test_a_run_of_measured_computation_is_refused(tmp_path: Path) -> None:
    """Its times are nobody's model."""
    program = "import torch\noptimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])\n"
    (tmp_path / "train.py").write_text(program + "for _ in range(20):\n    optimizer.step()\n")
    done = prismscale("run", "--world-size", 1, "--out", tmp_path / "cpu", tmp_path / "train.py")
    assert done.code == 0, done.err
    done = calibrated(tmp_path, f"{tmp_path}/cpu=9ms")
    assert done.code == 2
    assert "--device null" in done.err


def test_a_job_that_hangs_is_refused(folder: Path) -> None:
    """It has no step."""
    where = ("--device", "null", "--world-size", 2, "--out", folder / "hung")
    done = prismscale("run", *where, "--hang", "1@step2", folder / "train.py", 256, 4)
    assert "the job hangs" in done.err
    done = calibrated(folder, f"{folder}/hung=9ms", out="none.toml")
    assert done.code == 2
    assert "hangs" in done.err
