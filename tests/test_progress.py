"""What commands print to."""

from __future__ import annotations

import pytest
from rich.table import Table

from prismscale.progress import TerminalReporter, terminal


@pytest.mark.parametrize("stderr", [False, True])
def test_piped_lines_end_where_their_text_ends(
    stderr: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables fill their lines with blanks, which only a terminal needs."""
    table = Table("step", "time")
    table.add_row("a long name", "1 ms")
    terminal(stderr=stderr).print(table, "end")
    captured = capsys.readouterr()
    lines = (captured.err if stderr else captured.out).splitlines()
    assert "a long name" in "".join(lines)
    assert lines == [line.rstrip() for line in lines]


def test_blanks_within_a_line_stay(capsys: pytest.CaptureFixture[str]) -> None:
    """A line may be printed in parts."""
    screen = terminal()
    screen.print("error: ", end="")
    screen.print("no such file ")
    assert capsys.readouterr().out == "error: no such file\n"


@pytest.mark.parametrize("name", ['fit --over {"a":1}', "fit x=[/a]"])
def test_a_stage_may_have_any_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A change that the user wrote is no template."""
    with TerminalReporter(terminal()).stage(name) as update:
        update(1, 1, "done [/b]")
    assert name in capsys.readouterr().out
