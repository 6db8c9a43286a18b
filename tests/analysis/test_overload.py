"""Megatron-LM's overload factors, of what routers chose."""

from __future__ import annotations

import pytest

from prismscale.analysis.overload import RouterStep, RouterUse, overload_factors

GROUP = ((0, 1),)


def use(*counts: tuple[int, ...], backward_after: tuple[int, ...] = ()) -> RouterUse:
    """One step of one rank."""
    return RouterUse(steps=(RouterStep(counts=counts, backward_after=backward_after),))


def test_factors_are_of_the_fullest_rank_over_an_equal_share() -> None:
    """Of each choice of a router; two ranks with two experts each."""
    uses = {0: use((6, 2, 0, 0), (2, 2, 2, 2)), 1: use((4, 0, 2, 2), (2, 2, 2, 2))}
    factors = overload_factors(uses, GROUP)
    assert factors is not None
    assert (factors.experts, factors.ranks, factors.steps) == (4, 2, 1)
    assert (factors.avg, factors.max) == (pytest.approx((12 / 8 + 1) / 2), 1.5)


def test_a_rank_that_was_not_seen_sends_as_the_other_does() -> None:
    """So that one captured rank is enough where all route alike."""
    factors = overload_factors({1: use((6, 2, 0, 0))}, GROUP)
    assert factors is not None
    assert factors.max == 2.0


def test_what_is_kept_for_backward_passes_is_cumulated() -> None:
    """Two microbatches in flight, the second before the first's backward pass: the fullest rank
    keeps 6 + 2 tokens where equal shares would be 4 + 4."""
    uneven = (6, 0, 2, 0), (2, 0, 6, 0)
    both = overload_factors({0: use(*uneven, backward_after=(2, 2))}, GROUP)
    one = overload_factors({0: use(*uneven, backward_after=(1, 2))}, GROUP)
    assert both is not None
    assert one is not None
    assert (both.max_cum, one.max_cum) == (1.0, 1.5)


@pytest.mark.parametrize("groups", [(), ((0, 1, 2),)])
def test_experts_that_do_not_fit_the_groups_have_no_factors(
    groups: tuple[tuple[int, ...], ...],
) -> None:
    """Nothing is spread, or not evenly."""
    assert overload_factors({0: use((1, 1, 1, 1))}, groups) is None
