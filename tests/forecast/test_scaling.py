"""What step-time distributions become when the job grows."""

import numpy as np
import pytest

from prismscale.cost.collective import NullCollectiveModel
from prismscale.errors import UsageError
from prismscale.forecast.distributions.duration_distribution import Normal, ks_distance
from prismscale.forecast.distributions.scaling import carry_over, tail_growth, widest_of
from prismscale.forecast.draws.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.draws.variation import Variation, vary
from prismscale.validation.synthetic_job import Layout, PassCosts, build_layout, median_durations


def drawn_at(dp, draws):
    costs = PassCosts(forward_ns=10**6, backward_ns=2 * 10**6)
    graph = build_layout(Layout(tp=1, pp=2, dp=dp, microbatches=4), costs)
    source = vary(graph, median_durations(graph, NullCollectiveModel()), Variation(compute_cv=0.1))
    return draw_steps(graph, source, MonteCarlo(draws=draws, steps=1)).step_ns_D


def test_order_statistics_agree_with_simulation():
    """From draws of 4 replicas, the quantiles of 32 replicas are those of simulating 32."""
    found = tail_growth(drawn_at(4, 20_000), [8])[0]
    simulated = np.quantile(drawn_at(32, 2_000), [0.5, 0.95])
    assert found.resolved
    assert [found.p50_ns, found.p95_ns] == pytest.approx(simulated, rel=3e-3)


def test_a_maximum_follows_the_power_of_the_cdf():
    """Draws of the slowest of ten are those of ten draws' maximum."""
    one = Normal(mean=1e9, std=1e8)
    largest = one.sample(np.random.default_rng(0), (20_000, 10)).max(axis=1)
    assert ks_distance(widest_of(one, 10), largest) < 0.012


def test_tails_that_draws_cannot_resolve_are_marked():
    """A hundred draws say nothing about the p95 of a thousand times as many replicas."""
    near, far = tail_growth(drawn_at(2, 128), [1, 1000])
    assert near.resolved
    assert not far.resolved


def test_drift_grows_with_the_step_and_jitter_does_not():
    """A slow wave is doubled with the step; noise from step to step keeps its size."""
    wave = np.sin(np.arange(800) / 800 * 4 * np.pi)
    jitter = np.random.default_rng(0).normal(0, 1e6, 800)
    carried = carry_over(1e9 + 1e7 * wave + jitter, 2e9)
    assert wave @ (carried - 2e9) / (wave @ wave) == pytest.approx(2e7, rel=0.02)
    assert np.diff(carried).std() == pytest.approx(np.diff(jitter).std(), rel=0.1)


def test_nothing_to_carry_is_refused():
    """No steps, no median, no width."""
    with pytest.raises(UsageError, match="0 steps"):
        carry_over(np.array([]), 1.0)
    with pytest.raises(UsageError, match="at least 1"):
        widest_of(Normal(mean=1.0, std=1.0), 0.5)
