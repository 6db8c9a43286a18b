"""``x[:, ids]`` and its like: slices, absent dimensions and index tensors in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

SHAPE = (3, 4, 5)
_IDS = st.lists(st.integers(0, 2), min_size=2, max_size=2).map(torch.tensor)
"""Every axis has as many."""
_PART = st.sampled_from([slice(None), slice(1, None), None, 1]) | _IDS
_INDEX = st.lists(_PART, min_size=1, max_size=3)


def on_device(index: Sequence[Any]) -> tuple[Any, ...]:
    """The same with its tensors on the null device."""
    return tuple(part.cuda() if isinstance(part, torch.Tensor) else part for part in index)


def numbers() -> torch.Tensor:
    """All different."""
    return torch.arange(60).view(SHAPE)


@settings(deadline=None)
@given(_INDEX)
def test_known_values_are_those_of_a_cpu(index: list[Any]) -> None:
    """Read, and written in place."""
    ours, theirs = numbers().cuda(), numbers()
    assert ours[on_device(index)].tolist() == theirs[tuple(index)].tolist()
    ours[on_device(index)] = -1
    theirs[tuple(index)] = -1
    assert ours.tolist() == theirs.tolist()


@settings(deadline=None)
@given(_INDEX)
def test_unknown_values_have_the_shapes_of_a_cpu(index: list[Any]) -> None:
    """Forward and backward."""
    ours = torch.empty(SHAPE, device="cuda", requires_grad=True)
    found = ours[on_device(index)]
    found.sum().backward()
    assert found.shape == numbers()[tuple(index)].shape
    assert ours.grad is not None
    assert ours.grad.shape == SHAPE


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_mask_of_an_axis_takes_what_it_marks(axis: int) -> None:
    """Behind slices, too."""
    mask = torch.arange(SHAPE[axis]) % 2 == 0
    index = (*[slice(None)] * axis, mask)
    assert numbers().cuda()[on_device(index)].tolist() == numbers()[index].tolist()
