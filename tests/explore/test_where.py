"""Conditions on the points of a sweep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.errors import UsageError
from prismscale.explore.where import LONGEST, Condition

NAMES = {"tp": "4", "pp": "8", "schedule": "1f1b", "rate": "0.5", "fast": ""}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ("tp*pp <= 32", True),
        ("tp*pp < 32", False),
        ("1 < tp < pp and schedule == '1f1b'", True),
        ("schedule in ('gpipe', 'interleaved') or not tp", False),
        ("schedule != 'gpipe'", True),
        ("tp == '4'", True),
        ("pp % tp == 0 and pp // tp == 2 and pp / tp == 2.0", True),
        ("tp not in (1, 2)", True),
        ("-tp + pp - 4 == 0", True),
        ("rate == 0.5", True),
        ("fast", False),
        ("True", True),
    ],
)
def test_conditions_hold_or_not(text: str, expected: bool) -> None:
    """Numbers are numbers, anything else is text."""
    assert Condition(text, NAMES).holds(NAMES) is expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("shedule == 1", "knows no 'shedule'.*did you mean schedule"),
        ("tp <=", "is no condition"),
        ("tp ** 9 < 3", "not in its language"),
        ("tp.real > 1", "not in its language"),
        ("__import__('os').system('true')", "not in its language"),
        ("[tp]", "not in its language"),
        ("tp if pp else 1", "not in its language"),
        ("f'{tp}' == '4'", "not in its language"),
        ("(lambda: 1)()", "not in its language"),
        ("(tp := 3)", "not in its language"),
        ("tp is None", "not in its language"),
        ("(" * 400, "is no condition"),
        ("0" * (LONGEST + 1), "characters"),
        ("'\0' == tp", "is no condition"),
    ],
)
def test_what_is_not_in_the_language_is_refused(text: str, says: str) -> None:
    """Before anything is evaluated."""
    with pytest.raises(UsageError, match=says):
        Condition(text, NAMES)


@pytest.mark.parametrize(
    "text", ["tp < schedule", "schedule * 2 == 4", "tp / 0 > 1", "'a' * 10 == 3", "-schedule == 1"]
)
def test_what_cannot_be_told_is_refused(text: str) -> None:
    """With the values for which it could not."""
    with pytest.raises(UsageError, match="cannot be told for tp=4, pp=8, schedule=1f1b"):
        Condition(text, NAMES).holds(NAMES)


@given(st.text(max_size=60))
def test_any_text_is_a_condition_or_refused(text: str) -> None:
    """Nothing else comes of it."""
    try:
        Condition(text, NAMES).holds(NAMES)
    except UsageError:
        return
