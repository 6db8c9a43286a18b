"""The accuracy page and its sections."""

from dataclasses import replace

import pytest

from prismscale.errors import FormatError, UsageError
from prismscale.validation.accuracy_page import renew, renew_summary, section
from prismscale.validation.causes import CAUSES, with_causes
from prismscale.validation.error_rows import times_the_bar, worst_first
from prismscale.validation.rows import Row

MARKERS = "<!-- begin accuracy summary -->\n<!-- end accuracy summary -->"
ROWS = [Row.at_most("error", 0.5, 1.0, "%"), Row.at_most("tail", 3.0, 2.0, "%"), Row.told("n", 7)]


def test_misses_are_shown():
    """A section counts bars met, and says of a miss by how much and why."""
    text = section("Forecast", ROWS, command="prismscale validate forecast")
    assert "1 of 2 bars met" in text
    assert "| tail | 3 % | ≤ 2 % | **missed** 1.50 ×: cause not known |" in text
    assert "| n | 7 |  |  |" in text


def test_others_have_a_column_each():
    """Rows of which they say nothing have an empty cell."""
    rows = [replace(ROWS[0], others={"rule of thumb": 40.0}), ROWS[1]]
    text = section("Steps", rows, command="check")
    assert "| what | measured | bar |  | rule of thumb |" in text
    assert "| error | 0.5 % | ≤ 1 % | met | 40 % |" in text
    assert "cause not known |  |" in text


def test_a_section_is_renewed_in_its_place(tmp_path):
    """The second writing replaces the first and leaves other sections."""
    page = tmp_path / "accuracy.md"
    renew(page, {name: section(name, ROWS, command=f"check {name}") for name in ("A", "B")})
    renew(page, {"A": section("A", ROWS[:1], command="check A again")})
    text = page.read_text()
    assert text.index("check A again") < text.index("check B")
    assert text.count("## A") == 1


def test_misses_of_all_sections_come_first(tmp_path):
    """The worst one on top, whichever section it is of, with its cause."""
    page = tmp_path / "accuracy.md"
    worse = replace(Row.at_most("far off", 50.0, 10.0, "%"), note="a law is missing")
    renew(page, {"A": section("A", ROWS, command="a"), "B": section("B", [worse], command="b")})
    first = page.read_text().split("## A")[0]
    assert "Missed: 2, the worst first" in first
    assert "| far off | 50 % | ≤ 10 % | 5.00 × | a law is missing |" in first
    assert first.index("far off") < first.index("| tail |")
    renew(page, {"B": section("B", ROWS[:1], command="b")})
    assert "Missed: 1, the worst first" in page.read_text()
    assert "far off" not in page.read_text()


def test_a_lost_marker_is_refused(tmp_path):
    """Half a section is not guessed at."""
    page = tmp_path / "accuracy.md"
    page.write_text("<!-- begin A -->\ntext\n")
    with pytest.raises(FormatError, match="restore the other"):
        renew(page, {"A": section("A", ROWS, command="check")})


def test_a_summary_has_ten_lines(tmp_path):
    """Bars met of each part of the page, then the worst misses; what is around it stays."""
    page, readme = tmp_path / "accuracy.md", tmp_path / "README.md"
    missed = [Row.at_most(f"miss {n}", 10.0 + n, 1.0, "%") for n in range(20)]
    parts = {"Kernels": missed, "Forecast": ROWS}
    renew(page, {name: section(name, rows, command="check") for name, rows in parts.items()})
    readme.write_text(f"before\n{MARKERS}\nafter\n")
    renew_summary(readme, page)
    lines = readme.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    table = lines[2:-2]
    assert len(table) == 10
    assert "| Kernels | 0 of 20 |" in table
    assert table[4] == "| missed, kernels: miss 19 | 29 % (≤ 1 %) |"


def test_a_page_without_a_summary_is_refused(tmp_path):
    """With the markers that it should have."""
    page, readme = tmp_path / "accuracy.md", tmp_path / "README.md"
    renew(page, {"Forecast": section("Forecast", ROWS, command="check")})
    readme.write_text("text\n")
    with pytest.raises(UsageError, match="begin accuracy summary"):
        renew_summary(readme, page)


@pytest.mark.parametrize(
    ("row", "times"),
    [
        (Row.at_most("a", 3.0, 2.0), 1.5),
        (Row.at_least("a", 10.0, 20.0), 2.0),
        (Row.at_least("a", 0.0, 20.0), 999.0),
        (Row.at_most("a", float("nan"), 2.0), 999.0),
        (Row.told("a", 3.0), 0.0),
    ],
)
def test_how_far_a_bar_is_missed(row, times):
    """Above 1 where it is, to whichever side the bar lies."""
    assert times_the_bar(row) == times


def test_the_worst_comes_first():
    """Misses by how far, then what is met, then what has no bar."""
    near, far = Row.at_most("near", 2.1, 2.0), Row.at_least("far", 1.0, 20.0)
    names = [row.name for row in worst_first([*ROWS, near, far])]
    assert names == ["far", "tail", "near", "error", "n"]


def test_a_miss_has_its_cause():
    """Where it is known; a row's own note stays, and what is met needs none."""
    part, cause = CAUSES[0]
    missed = Row.at_most(f"some {part} row", 3.0, 2.0)
    noted = replace(missed, note="its own")
    met = Row.at_most(part, 1.0, 2.0)
    assert [row.note for row in with_causes([missed, noted, met])] == [cause, "its own", ""]
