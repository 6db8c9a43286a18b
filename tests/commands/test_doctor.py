"""``prismscale doctor``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from prismscale import installation
from prismscale.cli import app
from prismscale.installation import State, examine


def test_a_complete_installation_works() -> None:
    """The null device is really tried; ten lines at most at 80 columns, and exit code 0."""
    done = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    assert "device null  works" in done.output
    parts = [line.split()[0] for line in done.output.splitlines() if not line.startswith(" ")]
    assert len(parts) <= 10


def test_what_is_broken_says_how_to_mend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch nothing else is looked at."""
    monkeypatch.setattr(installation, "installed_torch", lambda: None)
    found = list(examine())
    assert [f.part for f in found] == ["prismscale", "torch"]
    assert (found[-1].state, found[-1].mend) == (State.BROKEN, "pip install torch")
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def _fails(*_: Any) -> str:
    return "no C++ compiler"


def test_a_crash_names_its_kind_and_its_line() -> None:
    """Not the list of modules with which faulthandler's text ends."""
    found = installation._child("-X", "faulthandler", "-c", "import os, numpy; os.abort()")
    assert isinstance(found, str)
    assert found.startswith("Fatal Python error: Aborted, was ended by signal 6")
    assert 'File "<string>", line 1 in <module>' in found


def _without_space(_: Any) -> Any:
    class Usage:
        free = 1 << 20

    return Usage


@pytest.mark.parametrize(
    ("part", "name", "answer"),
    [
        ("device null", "_child", _fails),
        ("device cuda", "_child", _fails),
        ("compiler", "find_compiler", lambda: None),
        ("cache", "disk_usage", _without_space),
    ],
)
def test_each_part_can_be_missing(
    monkeypatch: pytest.MonkeyPatch, part: str, name: str, answer: Callable[..., Any]
) -> None:
    """It is named, and what stands beside it is what the check said."""
    owner = installation.shutil if name == "disk_usage" else installation
    monkeypatch.setattr(owner, name, answer)
    finding = next(f for f in examine() if f.part == part)
    assert finding.state is not State.WORKS
    assert finding.detail
