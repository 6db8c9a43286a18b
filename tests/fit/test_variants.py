"""Changes of a program's options, as ``--try`` reads them."""

from __future__ import annotations

import pytest

from prismscale.errors import UsageError
from prismscale.fit.variants import Change, changed


@pytest.mark.parametrize(
    ("given", "change", "expected"),
    [
        ("--tp 2 --pp 4", "--tp 8", "--pp 4 --tp 8"),
        ("--tp=2 --pp 4", "--tp 8", "--pp 4 --tp 8"),
        ("--pp 4", "--ac.mode full", "--pp 4 --ac.mode full"),
        ("--sizes 1 2 3 --pp 4", "--sizes 7", "--pp 4 --sizes 7"),
        ("--offset -3 --pp 4", "--offset 2", "--pp 4 --offset 2"),
        ("--compile --pp 4", "--no-compile", "--pp 4 --no-compile"),
        ("file.toml --pp 4", "other", "file.toml --pp 4 other"),
        ("--tp 2 file.toml", "--tp 4", "file.toml --tp 4"),
        ("--name base model.tp=2 steps=5", "--name big", "model.tp=2 steps=5 --name big"),
    ],
)
def test_an_option_takes_the_place_of_itself(given: str, change: str, expected: str) -> None:
    """With all its values, in either spelling; other options and words stay."""
    assert changed(given.split(), change.split()) == tuple(expected.split())


def test_variables_stand_before_options() -> None:
    """As on a shell's command line."""
    change = Change.parse("A=1 B='x y' --tp 8")

    assert change.environment == {"A": "1", "B": "x y"}
    assert change.arguments == ("--tp", "8")


@pytest.mark.parametrize("text", ["", "  ", "'unclosed"])
def test_nothing_is_no_change(text: str) -> None:
    """An error says how one is written."""
    with pytest.raises(UsageError, match="--try"):
        Change.parse(text)
