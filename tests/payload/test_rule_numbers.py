"""Numbers that rules give, and the tensors that are to hold them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import prismscale
from prismscale.emulation.hook import Collective
from prismscale.errors import UsageError
from prismscale.graph.node import CollectiveOp
from prismscale.payload.rules.rule import ATTRIBUTE
from prismscale.payload.rules.rule_book import RuleBook
from support.calls import call


def fill(collective: Collective, value: Any) -> None:
    """Answer by a rule that gives ``value`` for every peer."""
    made = getattr(prismscale.payload_rule(name="given")(lambda told: value), ATTRIBUTE)
    assert RuleBook([made]).offer(collective, lambda: None)


@pytest.mark.parametrize("value", [0.1, [0.1]], ids=str)
def test_a_number_has_the_precision_of_the_tensor(value: Any) -> None:
    """Also in a list."""
    output = torch.empty(1, dtype=torch.float64)
    fill(call(5, output, op=CollectiveOp.BROADCAST, root=0), value)
    assert output.item() == 0.1


UNFIT: list[tuple[Any, torch.dtype, str]] = [
    (1000, torch.uint8, "gives 1000 for broadcast of uint8; give a whole number from 0 to 255"),
    ([1000], torch.uint8, "gives 1000 .* narrow the rule"),
    (-1, torch.uint16, "a whole number from 0 to 65535"),
    (0.5, torch.int64, "gives 0.5 for broadcast of int64; give a whole number"),
    (float("nan"), torch.int64, "gives nan"),
    (float("inf"), torch.int32, "gives inf"),
    (2**63, torch.int64, "a whole number from -9223372036854775808 to 9223372036854775807"),
    (2, torch.bool, "gives 2 for broadcast of bool; give 0 or 1"),
    (70_000, torch.float16, "a number from -65504 to 65504"),
    (10**400, torch.float64, "for broadcast of float64"),
    (float("inf"), torch.float8_e4m3fn, "a number from -448 to 448"),
]


@pytest.mark.parametrize(("value", "dtype", "message"), UNFIT)
def test_a_number_that_the_tensors_cannot_hold_is_refused(
    value: Any, dtype: torch.dtype, message: str
) -> None:
    """And does not become another number."""
    output = torch.empty(1, dtype=dtype)
    with pytest.raises(UsageError, match=f"rule .* {message}"):
        fill(call(5, output, op=CollectiveOp.BROADCAST, root=0), value)


FIT: list[tuple[Any, torch.dtype]] = [
    (True, torch.bool),
    (1.0, torch.bool),
    (2.0, torch.int64),
    (2**64 - 1, torch.uint64),
    (3.0, torch.uint16),
    (float("inf"), torch.bfloat16),
    (float("nan"), torch.float8_e4m3fn),
    (2**70, torch.float32),
    (True, torch.complex64),
]


@pytest.mark.parametrize(("value", "dtype"), FIT, ids=str)
@pytest.mark.parametrize("is_list", [False, True])
def test_a_number_that_the_tensors_can_hold_arrives(
    value: Any, dtype: torch.dtype, is_list: bool
) -> None:
    """Whether Python calls it whole or not."""
    output = torch.empty(1, dtype=dtype)
    said = [value] if is_list else value
    fill(call(5, output, op=CollectiveOp.BROADCAST, root=0), said)
    found = output.to(torch.complex128).real.item()
    assert found == pytest.approx(float(value), nan_ok=True)
