"""``prismscale health``: speeds of nodes, measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from prismscale.commands.health import health
from prismscale.errors import FormatError, UsageError
from prismscale.forecast.placement.nodes import read_nodes
from prismscale.measure import node_speed as check


def run(*arguments: object) -> None:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(health)
    done = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0


def test_each_node_adds_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placement reads them: the median node has factor 1. A second check renews the line."""
    for name, seconds in (("a", 9.0), ("b", 2.0), ("c", 3.0), ("a", 1.0)):
        monkeypatch.setattr(check, "check_seconds", lambda device, s=seconds: s)
        run(tmp_path / "h.csv", "--name", name)
    found = {n.name: n.factor for n in read_nodes(tmp_path / "h.csv")}
    assert found == {"a": 0.5, "b": 1.0, "c": 1.5}


def test_nodes_may_be_checked_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of one that ends while another is timed stays."""

    def timed_later(device: str) -> float:
        monkeypatch.setattr(check, "check_seconds", lambda device: 1.0)
        run(tmp_path / "h.csv", "--name", "other")
        return 2.0

    monkeypatch.setattr(check, "check_seconds", timed_later)
    run(tmp_path / "h.csv", "--name", "this")
    assert {n.name for n in read_nodes(tmp_path / "h.csv")} == {"this", "other"}


def test_this_machine_can_be_checked() -> None:
    """A matrix product takes time."""
    assert check.check_seconds("cpu") > 0


def test_what_cannot_be_checked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other devices, and GPUs that are not there."""
    monkeypatch.setattr(check.torch.cuda, "is_available", lambda: False)
    for device, says in (("tpu", "cpu, cuda"), ("cuda", "no GPU here")):
        with pytest.raises(UsageError, match=says):
            check.check_seconds(device)


@pytest.mark.parametrize("text", ["x,y\n1,2\n", "node,seconds\na,fast\n", "node,seconds\na\n"])
def test_other_files_are_not_overwritten(tmp_path: Path, text: str) -> None:
    """They are refused by name, and stay as they are."""
    (tmp_path / "h.csv").write_text(text)
    with pytest.raises(FormatError, match=r"h\.csv is no list of health checks"):
        run(tmp_path / "h.csv")
    assert (tmp_path / "h.csv").read_text() == text
