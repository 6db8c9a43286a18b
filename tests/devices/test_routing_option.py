"""``--routing``: how many tokens each expert gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from prismscale.devices.routing import Routing
from prismscale.errors import FormatError, PrismscaleError, UsageError


def test_rules_and_files_are_read(tmp_path: Path) -> None:
    """Uniform, a power of the expert's number, or loads by expert with or without a header."""
    assert Routing.parse("uniform") == Routing()
    assert Routing.parse("zipf:1.2") == Routing(exponent=1.2)
    path = tmp_path / "experts.csv"
    path.write_text("expert,tokens\n0,100\n1,300\n\n")
    assert Routing.parse(str(path)).loads == (100.0, 300.0)
    path.write_text("5\n5\n")
    assert Routing.parse(str(path)).loads == (5.0, 5.0)


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        (None, UsageError, "zipf:S with S from 0 to 10"),
        ("expert,tokens\n", FormatError, "one line for each expert"),
        ("1\ntwo\n", FormatError, "line 2 ends with no number"),
        ("0\n0\n", UsageError, "do not sum to 0"),
        ("-1\n2\n", UsageError, "at least 0"),
    ],
)
def test_a_bad_file_says_what_is_allowed(
    tmp_path: Path, content: str | None, kind: type[PrismscaleError], said: str
) -> None:
    """Missing, empty, without numbers, without tokens."""
    path = tmp_path / "experts.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(kind, match=said):
        Routing.parse(str(path))


@pytest.mark.parametrize("text", ["zipf:", "zipf:x", "zipf:-1", "zipf:11"])
def test_a_bad_exponent_says_what_is_allowed(text: str) -> None:
    """A number from 0 to 10."""
    with pytest.raises(UsageError, match="zipf:S with S from 0 to 10"):
        Routing.parse(text)
