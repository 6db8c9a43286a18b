"""Which stages of a pipeline ``fit`` captures."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.fit.stage_ranks import captured_positions


def captured(parameters: Sequence[int]) -> list[int]:
    """Of stages that hold ``parameters``; no stage is captured twice."""
    seen: list[int] = []

    def capture(positions: Sequence[int]) -> None:
        assert not set(seen) & set(positions)
        seen.extend(positions)

    def parameter_bytes(position: int) -> int:
        assert position in seen
        return parameters[position]

    found = captured_positions(len(parameters), capture, parameter_bytes)
    assert found == sorted(seen)
    return found


@pytest.mark.parametrize("n_stages", [1, 2, 3, 4])
def test_few_stages_are_all_captured(n_stages: int) -> None:
    """There is nothing between the first two and the last two."""
    assert captured([7] * n_stages) == list(range(n_stages))


def test_equal_stages_between_are_not_captured() -> None:
    """The first and the last have more, as they do with embeddings and the loss."""
    assert captured([9, *[7] * 14, 9]) == [0, 1, 14, 15]


def test_stages_that_hold_fewer_than_an_earlier_one_are_not_captured() -> None:
    """The first of them has a layer more, and as many microbatches in flight."""
    assert captured([9, 8, *[7] * 13, 9]) == [0, 1, 14, 15]


def test_stages_are_captured_where_later_ones_hold_more() -> None:
    """The last eight have a layer more."""
    assert captured([9, *[7] * 6, *[8] * 8, 9]) == [0, 1, 4, 5, 6, 7, 14, 15]


@given(st.integers(5, 40), st.data())
def test_stages_that_grow_are_seen_at_every_size(n_stages: int, data: st.DataObject) -> None:
    """Of each number of parameters there is a captured stage that holds as many."""
    middle = data.draw(st.lists(st.integers(1, 4), min_size=n_stages - 2, max_size=n_stages - 2))
    parameters = [9, *sorted(middle), 9]
    assert {parameters[place] for place in captured(parameters)} == set(parameters)
