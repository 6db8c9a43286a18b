"""Which torch is tested, and what is said of others."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

import pytest

from prismscale.torch_versions import (
    NEWEST,
    OLDEST,
    installed_torch,
    supported_versions,
    torch_remark,
)

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.0+cu132", "2.15.1", "odd"])
def test_nothing_is_said_of_a_tested_version(version: str) -> None:
    """Local labels and patch releases do not matter."""
    assert torch_remark(version) is None


@pytest.mark.parametrize(("version", "age"), [("2.16.0", "newer"), ("2.10.1", "older")])
def test_another_version_is_named_with_the_way_out(version: str, age: str) -> None:
    """It is tried all the same."""
    remark = torch_remark(version) or ""
    assert f"torch {version} is {age}" in remark
    assert supported_versions() in remark
    assert "pip install" in remark


def test_the_torch_of_the_tests_is_among_them() -> None:
    """What the tests run with is what the package says."""
    assert installed_torch() is not None
    assert torch_remark() is None


def test_the_matrix_runs_all_that_the_package_names() -> None:
    """Every torch from the oldest to the newest, and every Python among the classifiers."""
    pairs = runpy.run_path(str(ROOT / "scripts/test-matrix"))["PAIRS"]
    assert [torch for _, torch in pairs] == [f"2.{n}" for n in range(OLDEST[1], NEWEST[1] + 1)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = {line.rpartition(" ")[2] for line in project["classifiers"] if " :: 3." in line}
    assert {python for python, _ in pairs} == pythons
