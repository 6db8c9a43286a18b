"""Distributions of durations and the choice among them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.errors import FormatError
from prismscale.forecast.distributions.duration_distribution import (
    BodyAndTail,
    Empirical,
    Gamma,
    LogNormal,
    Normal,
    borrowed_tail,
    fit,
    ks_distance,
)

DISTRIBUTIONS = [
    Normal(mean=1e6, std=5e4),
    Gamma(shape=3.0, scale=1e5),
    LogNormal(mean_log=13.0, std_log=0.4),
    BodyAndTail(body=Normal(mean=1e6, std=1e4), stall=0.05, tail_from=2e6, tail_scale=5e5),
    Empirical(sorted_ns=np.arange(1.0, 101.0)),
]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda found: type(found).__name__)
def test_draws_follow_the_cdf(distribution):
    """A large sample of every distribution is near its own CDF."""
    draws = distribution.sample(np.random.default_rng(1), (20_000,))
    assert draws.min() >= 0
    assert ks_distance(distribution, draws) < 0.012


@pytest.mark.parametrize("distribution", DISTRIBUTIONS[:4], ids=lambda found: type(found).__name__)
def test_quantile_inverts_the_cdf(distribution):
    """cdf(quantile(q)) is q."""
    q = np.array([0.05, 0.3, 0.5, 0.9, 0.97, 0.999])
    assert distribution.cdf(distribution.quantile(q)) == pytest.approx(q, abs=1e-6)


@pytest.mark.parametrize(
    "distribution", [DISTRIBUTIONS[1], DISTRIBUTIONS[2]], ids=["gamma", "lognormal"]
)
def test_a_skewed_family_is_recognised(distribution):
    """A pool drawn from a skewed family is given that family."""
    pool = distribution.sample(np.random.default_rng(2), (4_000,))
    assert isinstance(fit(pool).distribution, type(distribution))


def test_rare_stalls_become_a_tail():
    """Two per cent of durations three times as long are a body with a tail, not a wide normal."""
    rng = np.random.default_rng(3)
    pool = rng.normal(1e6, 1e4, 2_000)
    pool[:40] = 3e6 + rng.exponential(1e5, 40)
    chosen = fit(pool).distribution
    assert isinstance(chosen, BodyAndTail)
    assert chosen.stall == pytest.approx(0.02)


def test_a_pool_that_no_family_fits_is_used_as_it_is():
    """Two separate modes are drawn from the pool itself, and the note says so."""
    pool = np.concatenate([np.linspace(1e6, 1.1e6, 200), np.linspace(5e6, 5.1e6, 200)])
    chosen = fit(pool)
    assert isinstance(chosen.distribution, Empirical)
    assert "no family fits" in chosen.note


@pytest.mark.parametrize("n", [1, 2, 7])
def test_small_pools_say_so(n):
    """Fewer than eight durations are drawn as they are, with a note."""
    chosen = fit(np.arange(1.0, n + 1))
    assert chosen.name == "Empirical"
    assert "only" in chosen.note


def test_bad_durations_are_counted():
    """NaN and negative durations are refused with their numbers and the pool's name."""
    with pytest.raises(FormatError, match=r"gemm: 2 of 5 .* 1 are negative"):
        fit(np.array([1.0, np.nan, np.inf, -3.0, 2.0]), "gemm")
    with pytest.raises(FormatError, match="no durations"):
        fit(np.array([]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=60))
def test_any_legal_pool_is_fitted(pool):
    """Whatever legal durations come, draws are finite and not negative."""
    draws = fit(np.array(pool)).distribution.sample(np.random.default_rng(0), (50,))
    assert np.isfinite(draws).all()
    assert (draws >= 0).all()


@settings(max_examples=60, deadline=None)
@given(
    usual=st.integers(10**6, 10**12),
    extra=st.lists(st.integers(0, 3), min_size=8, max_size=60),
)
def test_nearly_equal_durations_are_no_skewed_family(usual, extra):
    """A few nanoseconds about a long duration are normal or the pool itself."""
    pool = usual * 100 + np.array(extra)
    chosen = fit(pool).distribution
    assert isinstance(chosen, Normal | Empirical)
    assert chosen.quantile(np.array([0.5])) == pytest.approx(usual * 100, rel=1e-7)


def test_a_borrowed_tail_is_that_of_the_others():
    """A sample whose largest values are stalls by chance takes the usual tail; its body stays."""
    rng = np.random.default_rng(0)
    others = [rng.normal(1.0, 0.01, 300) for _ in range(20)]
    own = rng.normal(5e6, 5e4, 300)
    own[:5] = 2e7
    distribution = borrowed_tail(own, others)
    assert distribution.quantile(np.array([0.5, 0.95])) == pytest.approx(
        np.quantile(own, [0.5, 0.95]), rel=2e-3
    )
    assert distribution.quantile(np.array([0.99]))[0] < 5.3e6


def test_without_others_a_sample_keeps_its_tail():
    """Nothing is borrowed where nothing can be, or where a sample is all tail."""
    own = np.arange(1.0, 51.0)
    assert borrowed_tail(own, []).quantile(np.array([1.0])) == [50.0]
    assert borrowed_tail(own[:5], [own]).quantile(np.array([1.0])) == [5.0]
