"""Hidden regimes of steps."""

import numpy as np
import pytest

from prismscale.errors import FormatError
from prismscale.forecast.distributions.regime import fit_regimes


def two_state_path(rng, n, stay=0.95):
    states = np.zeros(n, dtype=int)
    for t in range(1, n):
        states[t] = states[t - 1] if rng.random() < stay else 1 - states[t - 1]
    return states


def test_persistent_states_are_found():
    """Two well separated persistent states come back with means, persistence and every step."""
    rng = np.random.default_rng(0)
    states = two_state_path(rng, 400)
    found = fit_regimes([np.where(states, 12.0, 10.0) + rng.normal(0, 0.3, 400)])
    assert found.n_states == 2
    assert found.mean_K == pytest.approx([10, 12], abs=0.1)
    assert found.transition_KK.diagonal() == pytest.approx([0.95, 0.95], abs=0.04)
    assert (found.state_S == states).mean() > 0.99


def test_one_normal_state_is_left_alone():
    """Plain noise gets one state."""
    rng = np.random.default_rng(1)
    assert fit_regimes([rng.normal(5, 1, 300)]).n_states == 1


def test_two_rare_slow_steps_are_a_regime():
    """Two of 32 steps far from the rest are told apart, in windows that do not touch."""
    values = np.random.default_rng(2).normal(0.0105, 0.0003, 32)
    values[[5, 20]] = [0.27, 0.26]
    found = fit_regimes([values[:10], values[10:17], values[17:]])
    assert found.n_states == 2
    assert np.flatnonzero(found.state_S).tolist() == [5, 20]
    assert found.share_K[1] == pytest.approx(2 / 32, abs=0.01)


def test_few_steps_and_equal_steps_have_one_state():
    """Where nothing can be told, one state."""
    assert fit_regimes([np.array([1.0])]).n_states == 1
    assert fit_regimes([np.ones(50)]).n_states == 1


def test_the_fit_is_reproducible():
    """The same data and seed give the same states."""
    values = np.random.default_rng(3).gamma(2, 1, 120)
    a, b = fit_regimes([values], seed=7), fit_regimes([values], seed=7)
    assert a.mean_K.tolist() == b.mean_K.tolist()


def test_paths_keep_the_shares():
    """A long drawn path visits states as often, and leaves them as rarely, as fitted."""
    rng = np.random.default_rng(4)
    states = two_state_path(rng, 500)
    found = fit_regimes([np.where(states, 3.0, 1.0) + rng.normal(0, 0.1, 500)])
    path = np.zeros((200, 200), dtype=np.int64)
    for t in range(1, 200):
        path[:, t] = found.follow(rng, path[:, t - 1])
    path = path[:, 50:]
    assert (path == 1).mean() == pytest.approx(found.share_K[1], abs=0.05)
    jumps = (path[:, 1:] != path[:, :-1]).mean()
    assert jumps == pytest.approx(0.05, abs=0.02)


def test_bad_aggregates_are_counted():
    """Values that are not finite are refused with their number."""
    with pytest.raises(FormatError, match="3 steps, 1 of them not finite"):
        fit_regimes([np.array([1.0, np.nan, 2.0])])
