"""The accuracy page and its sections."""

import pytest

from prismscale.errors import FormatError
from prismscale.validation.accuracy_page import renew, section
from prismscale.validation.rows import Row

ROWS = [Row.at_most("error", 0.5, 1.0, "%"), Row.at_most("tail", 3.0, 2.0, "%"), Row.told("n", 7)]


def test_misses_are_shown():
    """A section counts bars met, and marks what missed."""
    text = section("Forecast", ROWS, command="prismscale validate forecast")
    assert "1 of 2 bars met" in text
    assert "| tail | 3 % | ≤ 2 % | **missed** |" in text
    assert "| n | 7 |  |  |" in text


def test_a_section_is_renewed_in_its_place(tmp_path):
    """The second writing replaces the first and leaves other sections."""
    page = tmp_path / "accuracy.md"
    for name in ("A", "B"):
        renew(page, name, section(name, ROWS, command=f"check {name}"))
    renew(page, "A", section("A", ROWS[:1], command="check A again"))
    text = page.read_text()
    assert text.index("check A again") < text.index("check B")
    assert text.count("## A") == 1


def test_a_lost_marker_is_refused(tmp_path):
    """Half a section is not guessed at."""
    page = tmp_path / "accuracy.md"
    page.write_text("<!-- begin A -->\ntext\n")
    with pytest.raises(FormatError, match="restore the other"):
        renew(page, "A", section("A", ROWS, command="check"))
