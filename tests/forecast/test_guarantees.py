"""Quantiles with confidence, slow steps, and days to train on machines that fail."""

import numpy as np
import pytest

from prismscale.errors import UsageError
from prismscale.forecast.guarantees import (
    TrainingPlan,
    daly_interval_s,
    quantile_estimates,
    slowdown_probability,
    training_time,
    young_interval_s,
)


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


def test_nothing_fails_without_a_failure_rate():
    """Without failures the days are the sum of the steps."""
    found = training_time(steps(), TrainingPlan(steps=86_400))
    assert found.days(0.5) == pytest.approx(1.0, rel=1e-2)
    assert not found.failures_D.any()


def test_expected_time_with_failures_matches_the_formula():
    """Mean completion time of restarted segments is (M + R) (e^(L/M) - 1) each (Daly, eq. 13 form,
    with the restart itself exposed to failures)."""
    plan = TrainingPlan(
        steps=864_000,
        nodes=100,
        mtbf_hours=1_000,
        checkpoint_s=120,
        restart_s=300,
        interval_s=3_600,
    )
    found = training_time(np.full(10, 10**9), plan, draws=4_000)
    mtbf, length = plan.job_mtbf_s, 3_600 + 120
    fail, again = 1 - np.exp(-length / mtbf), length + 300
    lost_first = mtbf - length * np.exp(-length / mtbf) / fail
    fail_again = 1 - np.exp(-again / mtbf)
    lost_again = mtbf - again * np.exp(-again / mtbf) / fail_again
    retries = fail_again / (1 - fail_again)
    each = length + fail * (lost_first + retries * lost_again + 300)
    expected = (240 * each - 120) / 86_400
    assert found.days_D.mean() == pytest.approx(expected, rel=3e-3)


def test_daly_beats_other_intervals():
    """Simulated days are fewest at Daly's interval, against half and twice of it."""
    base = {"steps": 864_000, "nodes": 1_000, "mtbf_hours": 20_000.0, "checkpoint_s": 300.0}
    best = daly_interval_s(300.0, TrainingPlan(**base).job_mtbf_s)
    days = {
        factor: training_time(
            np.full(10, 10**9), TrainingPlan(**base, interval_s=best * factor)
        ).days_D.mean()
        for factor in (0.4, 1.0, 2.5)
    }
    assert min(days, key=days.get) == 1.0


def test_daly_is_near_young_for_cheap_checkpoints():
    """For checkpoints much cheaper than the time between failures both agree."""
    assert daly_interval_s(10, 1e6) == pytest.approx(young_interval_s(10, 1e6), rel=1e-2)


@pytest.mark.parametrize(
    "bad", [{"steps": 0}, {"steps": 1, "mtbf_hours": 0.0}, {"steps": 1, "restart_s": -1.0}]
)
def test_impossible_plans_are_refused(bad):
    """Numbers that mean nothing are named."""
    with pytest.raises(UsageError, match="must be"):
        TrainingPlan(**bad)
    with pytest.raises(UsageError):
        quantile_estimates(steps(), [1.5])
