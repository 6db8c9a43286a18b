"""Prices of kernels that exchange tokens: by multiprocessors, tokens and rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.cost.exchange.exchange_law import COMBINE, DISPATCH, ExchangeLaw
from prismscale.cost.kernel import load_kernel_model

LAWS = pytest.mark.parametrize("law", [DISPATCH, COMBINE])
SIZES = {"moved": 21_500, "own": 4096, "row_bytes": 14_336}


@LAWS
def test_twice_the_multiprocessors_halve_all_but_the_start(law: ExchangeLaw) -> None:
    """Each multiprocessor has a rate of its own."""
    slow, fast = (law.time_ns(**SIZES, multiprocessors=n) - law.base_ns for n in (8, 16))
    assert slow == pytest.approx(2 * fast)


@LAWS
@given(more=st.integers(1, 10**6), size=st.sampled_from(sorted(SIZES)))
def test_more_of_anything_takes_longer(law: ExchangeLaw, more: int, size: str) -> None:
    """Tokens that are moved, own tokens, and bytes of each."""
    longer = law.time_ns(**SIZES | {size: SIZES[size] + more}, multiprocessors=20)
    assert longer > law.time_ns(**SIZES, multiprocessors=20)


def test_a_stated_exchange_costs_what_the_law_says() -> None:
    """The same on every GPU; only links differ, and those are the communication's."""
    stated = "extents=21500,4096,14336,20,{};launches=1;bits=16"
    for direction, law in enumerate((DISPATCH, COMBINE)):
        text = f"deep_ep::any.exchange\x1fBFloat16[4096,7168]\x1f\x1f{stated.format(direction)}"
        costs = [load_kernel_model(gpu).cost(text) for gpu in ("h100-sxm", "b200")]
        assert {cost.kind for cost in costs} == {"exchange"}
        assert {cost.device_ns for cost in costs} == {
            round(law.time_ns(**SIZES, multiprocessors=20))
        }


def test_no_multiprocessor_counts_as_one() -> None:
    """A program may leave the number to the library."""
    assert DISPATCH.time_ns(**SIZES, multiprocessors=0) == DISPATCH.time_ns(
        **SIZES, multiprocessors=1
    )
    assert replace(DISPATCH, base_ns=0).time_ns(moved=0, own=0, row_bytes=9, multiprocessors=1) == 0
