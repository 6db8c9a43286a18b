"""Quantiles with confidence, and slow steps."""

import numpy as np
import pytest

from prismscale.errors import UsageError
from prismscale.forecast.guarantees import quantile_estimates, slowdown_probability


def steps(n=2_000, mean=1e9, std=5e7, seed=0):
    return np.rint(np.random.default_rng(seed).normal(mean, std, n)).astype(np.int64)


def test_intervals_cover_the_truth():
    """The 95 % interval of a median holds the true median about 95 times in a hundred."""
    held = 0
    for seed in range(100):
        found = quantile_estimates(steps(200, seed=seed), [0.5], seed=seed)[0.5]
        held += found.low <= 1e9 <= found.high
    assert held >= 88


def test_more_draws_make_intervals_narrower():
    """A hundred times the draws, about a tenth of the width."""
    few, many = (quantile_estimates(steps(n), [0.95])[0.95] for n in (100, 10_000))
    assert many.high - many.low < (few.high - few.low) / 4


def test_slow_steps_are_counted():
    """Every tenth step twice the median is a probability of one tenth beyond 1.5."""
    drawn = np.full(1_000, 10**9)
    drawn[:100] *= 2
    found = slowdown_probability(drawn, 1.5)
    assert found.value == pytest.approx(0.1)
    assert found.low < 0.1 < found.high


def test_steps_of_one_run_say_less_than_steps_of_many():
    """Where steps of a run are alike, the interval is as wide as that of one step of each."""
    of_runs = steps(50, seed=1)
    alike = np.repeat(of_runs[:, np.newaxis], 8, axis=1)
    few, many = (quantile_estimates(a, [0.5])[0.5] for a in (of_runs, alike))
    assert many.high - many.low == pytest.approx(few.high - few.low, rel=0.25)
    one, all_of_it = (slowdown_probability(a, 1.01) for a in (of_runs, alike))
    assert one.value == all_of_it.value
    assert all_of_it.low == pytest.approx(one.low, abs=0.02)


@pytest.mark.parametrize("factor", [0.0, -1.0, np.nan, np.inf])
def test_impossible_factors_are_refused(factor):
    """No step is more than infinitely slow, and nothing is told of what is no number."""
    with pytest.raises(UsageError, match="finite and more than 0"):
        slowdown_probability(steps(), factor)


def test_impossible_quantiles_are_refused():
    """They lie between 0 and 1."""
    with pytest.raises(UsageError, match="between 0 and 1"):
        quantile_estimates(steps(), [1.5])
