"""Rows of a validation: verdicts, table, JSON."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from prismscale.errors import StorageError
from prismscale.validation.rows import Row, finish, print_rows, read_rows, renewed, write_rows


@pytest.mark.parametrize(("value", "ok"), [(0.4, True), (0.5, True), (0.6, False)])
def test_figure_must_not_exceed_its_bar(value: float, ok: bool) -> None:
    """The bar itself still passes."""
    assert Row.at_most("error", value, 0.5, "%").ok is ok


def test_figure_that_is_no_number_never_passes() -> None:
    """A failed measurement is a miss, whichever way the bar points."""
    assert not Row.at_most("a", math.nan, 1.0).ok
    assert not Row.at_least("a", math.nan, 1.0).ok


def test_rows_are_written_as_plain_json(tmp_path: Path) -> None:
    """A list of objects with the six keys; what JSON cannot say is null."""
    rows = [Row.at_least("gain", 1.2, 1.0, "x"), Row.told("nan", math.nan)]
    write_rows(rows, tmp_path / "new" / "rows.json")
    first, second = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert first == {
        "name": "gain",
        "value": 1.2,
        "unit": "x",
        "bar": 1.0,
        "least": True,
        "ok": True,
    }
    assert second["value"] is None


def test_what_a_row_notes_is_read_again(tmp_path: Path) -> None:
    """The reason of a miss stands beside its figure."""
    rows = [replace(Row.at_most("error", 2.0, 1.0, "%"), note="the router learns")]
    write_rows(rows, tmp_path / "rows.json")
    assert read_rows(tmp_path / "rows.json") == rows


def test_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A folder in the way is no traceback."""
    with pytest.raises(StorageError, match=str(tmp_path)):
        write_rows([], tmp_path)


def test_table_marks_what_was_missed() -> None:
    """People see at once which bar was missed."""
    text = io.StringIO()
    rows = [Row.at_most("good", 1, 2), Row.at_most("bad", 3, 2), Row.told("other", 4)]
    print_rows(rows, console=Console(file=text, width=80))
    assert "MISSED" in next(line for line in text.getvalue().splitlines() if "bad" in line)
    assert text.getvalue().count("MISSED") == 1


@pytest.mark.parametrize(("value", "code"), [(1, 0), (3, 1)])
def test_a_missed_bar_is_the_exit_code(tmp_path: Path, value: float, code: int) -> None:
    """And the rows are written all the same."""
    path = tmp_path / "rows.json"
    assert finish([Row.at_most("figure", value, 2)], json_path=path) == code
    assert len(json.loads(path.read_text())) == 1


def test_written_rows_are_read_again(tmp_path: Path) -> None:
    """Those that failed stay no number; a file that is not there has none."""
    path = tmp_path / "rows.json"
    rows = [Row.at_most("a", 1.5, 2.0, "s"), Row.at_most("b", math.nan, 1.0)]
    write_rows(rows, path)
    first, second = read_rows(path)
    assert first == rows[0]
    assert math.isnan(second.value)
    assert read_rows(tmp_path / "none.json") == []


def test_nothing_measured_is_no_success() -> None:
    """A bench that leaves everything out exits with 1."""
    assert finish([]) == 1


def test_rows_of_a_subject_are_renewed_together() -> None:
    """Also those that it has no longer; rows of other subjects stay."""
    old = [Row.told("8B: step", 1), Row.told("8B: peak", 2), Row.told("8B, FP8: step", 3)]
    found = [Row.told("8B: completes", 0)]
    assert renewed(old, found) == [old[2], *found]
