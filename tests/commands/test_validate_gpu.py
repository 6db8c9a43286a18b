"""``prismscale validate gpu``: what it refuses, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from prismscale.emulation.script import Script
from prismscale.validation.gpu_items import ITEMS, GpuItem
from prismscale.validation.gpu_runs import GpuRuns
from prismscale.validation.rows import Row
from support.runs import prismscale, write_program

ABOUT = {"date": "2026-01-02", "gpu": "NVIDIA H100", "driver": "570", "torch": "2.11"}


@pytest.fixture
def script(tmp_path: Path) -> str:
    return str(write_program(tmp_path))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one; nothing is run on it."""
    monkeypatch.setattr("prismscale.devices.cuda.require_cuda", lambda: None)
    monkeypatch.setattr(
        "prismscale.measure.gpu_machine.describe_machine",
        lambda command: ABOUT | {"command": command},
    )


def measured(monkeypatch: pytest.MonkeyPatch, name: str, *rows: Row) -> list[Script]:
    """Let an item have these rows; returns the programs that it is asked to measure."""
    asked: list[Script] = []

    def measure(runs: GpuRuns) -> list[Row]:
        asked.append(runs.script)
        return list(rows)

    monkeypatch.setitem(ITEMS, name, GpuItem(runs=1, measure=measure))
    return asked


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, script: str, tmp_path: Path
) -> None:
    """Exit code 2, what is missing, and no folder."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = prismscale("validate", "gpu", "--out", tmp_path / "out", script)
    assert done.code == 2
    assert done.err.startswith("error: nothing was measured: --device cuda needs")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--items", "run,overhed", "train.py"], "did you mean overhead"),
        ([], "no script given: prismscale validate gpu script.py"),
        (["no.py"], "script 'no.py' is not a file"),
        (["--bogus", "train.py"], "No such option: --bogus"),
    ],
)
def test_a_wrong_option_is_one_clear_sentence(args: list[str], said: str) -> None:
    """Told without looking for a GPU."""
    done = prismscale("validate", "gpu", *args)
    assert done.code == 2
    assert said in done.err


@pytest.mark.usefixtures("gpu")
def test_each_item_leaves_a_file(
    monkeypatch: pytest.MonkeyPatch, script: str, tmp_path: Path
) -> None:
    """Where its figures come from, and the figures; arguments of the script are the script's."""
    asked = measured(monkeypatch, "run", Row.told("live step", 7.5, "ms"))
    options = ["--items", "run", "--out", tmp_path / "out"]
    done = prismscale("validate", "gpu", *options, script, "--items", "9")
    assert done.code == 0
    assert asked[0].args == ("--items", "9")
    found = json.loads((tmp_path / "out" / "run.json").read_text())
    assert {name: found[name] for name in ABOUT} == ABOUT
    assert found["command"].startswith("prismscale validate gpu --items run --out ")
    assert [(row["name"], row["value"]) for row in found["rows"]] == [("live step", 7.5)]


@pytest.mark.usefixtures("gpu")
def test_a_missed_bar_is_shown_and_the_rest_measured(
    monkeypatch: pytest.MonkeyPatch, script: str, tmp_path: Path
) -> None:
    """Exit code 1, after all items."""
    measured(monkeypatch, "overhead", Row.at_most("ratio", 1.2, 1.01))
    measured(monkeypatch, "release", Row.told("late", 3.0, "µs"))
    out = tmp_path / "out"
    done = prismscale("validate", "gpu", "--items", "overhead,release", "--out", out, script)
    assert done.code == 1
    assert "MISSED" in done.out
    assert {path.name for path in out.glob("*.json")} == {"overhead.json", "release.json"}


@pytest.mark.usefixtures("gpu")
def test_a_module_takes_the_scripts_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in ``prismscale run``."""
    asked = measured(monkeypatch, "run", Row.told("live step", 7.5, "ms"))
    options = ["--items", "run", "--out", tmp_path, "-m", "pkg.train"]
    assert prismscale("validate", "gpu", *options, "--", "--tp", "4").code == 0
    assert asked == [Script(target="pkg.train", args=("--tp", "4"), is_module=True)]
