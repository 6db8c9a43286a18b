"""Persistent regimes: whether the cluster switches between a normal state and worse ones.

The model is a hidden Markov model with one to three states and normal emissions over one aggregate
per step (for example the total communication time). It is fitted by expectation-maximisation
(Baum-Welch; Rabiner, Proceedings of the IEEE 77(2), 1989, section III) on windows of consecutive
steps. The number of states is the one with the lowest Bayesian information criterion, so data that
does not show regimes gets one state.

Axes: ``K`` states, ``S`` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import FormatError, UsageError

Floats = NDArray[np.float64]

MOST_STATES = 3
FEWEST_STEPS_PER_STATE = 6
"""A number of states is tried only if the data has this many steps for each state."""
SMALLEST_VARIANCE = 1e-4
"""Smallest variance of a state, as a share of the variance of all steps. It keeps a state from
shrinking to one step."""
STARTS = 4
MOST_ROUNDS = 100
TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Regimes:
    """Hidden states of the steps, in ascending order of their mean."""

    mean_K: Floats
    std_K: Floats
    transition_KK: Floats
    """Probability of the next step's state (column) given this step's (row)."""
    share_K: Floats
    """Share of all steps that each state holds."""
    state_S: NDArray[np.int64]
    """Most probable state of every step of the data, windows one after another."""
    bic: float

    @property
    def n_states(self) -> int:
        """Number of regimes that the data supports."""
        return len(self.mean_K)

    def follow(self, rng: np.random.Generator, state_D: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draw the next step's state for every draw, given this step's."""
        above = rng.random(len(state_D))[:, None] > np.cumsum(self.transition_KK, axis=1)[state_D]
        return np.minimum(above.sum(axis=1), self.n_states - 1)


def fit_regimes(
    windows: Sequence[Floats], *, most_states: int = MOST_STATES, seed: int = 0
) -> Regimes:
    """Fit one to ``most_states`` states and keep the number that the data supports.

    Args:
        windows: runs of consecutive steps, with one aggregate per step. Steps follow each other
            within a window; nothing is known about the time between windows.
        most_states: largest number of states.
        seed: seed of the random starts.

    Raises:
        FormatError: no step, or a value that is not finite.
        UsageError: ``most_states`` is below 1.
    """
    if most_states < 1:
        raise UsageError(f"most_states is {most_states}; at least 1 is needed")
    windows = [np.asarray(w, dtype=np.float64) for w in windows if len(w)]
    values = np.concatenate(windows) if windows else np.zeros(0)
    bad = int((~np.isfinite(values)).sum())
    if len(values) == 0 or bad:
        raise FormatError(f"regimes: {len(values)} steps, {bad} of them not finite")
    rng = np.random.default_rng(seed)
    best = _one_state(values)
    if values.std() == 0.0:
        return best
    for k in range(2, most_states + 1):
        if len(values) < k * FEWEST_STEPS_PER_STATE:
            break
        tried = [_baum_welch(windows, values, k, rng, start) for start in range(STARTS)]
        best = min([best, *tried], key=lambda r: r.bic)
    return best


def _one_state(values: Floats) -> Regimes:
    std = float(values.std())
    with np.errstate(divide="ignore"):
        log_likelihood = -0.5 * len(values) * (np.log(2 * np.pi * std**2) + 1)
    return Regimes(
        mean_K=np.array([values.mean()]),
        std_K=np.array([std]),
        transition_KK=np.ones((1, 1)),
        share_K=np.ones(1),
        state_S=np.zeros(len(values), dtype=np.int64),
        bic=_bic(float(log_likelihood), 1, len(values)),
    )


def _bic(log_likelihood: float, k: int, n: int) -> float:
    free = 2 * k + k * (k - 1) + (k - 1)
    return float(free * np.log(n) - 2 * log_likelihood)


def _baum_welch(
    windows: Sequence[Floats], values: Floats, k: int, rng: np.random.Generator, start: int
) -> Regimes:
    mean_K, std_K = _start(values, k, rng, start)
    transition_KK = np.full((k, k), 0.1 / k) + 0.9 * np.eye(k)
    share_K = np.full(k, 1 / k)
    floor = np.sqrt(SMALLEST_VARIANCE) * values.std()
    previous = -np.inf
    for _ in range(MOST_ROUNDS):
        log_likelihood, gammas, jumps = 0.0, [], np.zeros((k, k))
        for window in windows:
            gained, gamma, jump = _forward_backward(window, mean_K, std_K, transition_KK, share_K)
            log_likelihood += gained
            gammas.append(gamma)
            jumps += jump
        posterior = np.concatenate(gammas)
        if log_likelihood - previous < TOLERANCE * abs(log_likelihood):
            break
        previous = log_likelihood
        weight_K = posterior.sum(axis=0) + 1e-12
        mean_K = posterior.T @ values / weight_K
        spread = (posterior * (values[:, None] - mean_K) ** 2).sum(axis=0) / weight_K
        std_K = np.maximum(np.sqrt(spread), floor)
        share_K = weight_K / weight_K.sum()
        # One added jump from each state, distributed as the states are, keeps unseen jumps
        # possible.
        smoothed = jumps + share_K
        transition_KK = smoothed / smoothed.sum(axis=1, keepdims=True)
    order = np.argsort(mean_K)
    return Regimes(
        mean_K=mean_K[order],
        std_K=std_K[order],
        transition_KK=transition_KK[np.ix_(order, order)],
        share_K=share_K[order] / share_K.sum(),
        state_S=posterior[:, order].argmax(axis=1).astype(np.int64),
        bic=_bic(log_likelihood, k, len(values)),
    )


def _start(values: Floats, k: int, rng: np.random.Generator, start: int) -> tuple[Floats, Floats]:
    """Return the initial means and standard deviations of the states.

    Start 0 takes means at quantiles, start 1 from the median to the slowest step, later ones at
    random steps.
    """
    if start == 0:
        mean_K = np.quantile(values, (np.arange(k) + 0.5) / k)
    elif start == 1:
        mean_K = np.linspace(np.median(values), values.max(), k)
    else:
        mean_K = np.sort(rng.choice(values, size=k, replace=False))
    return mean_K, np.full(k, max(values.std() / k, 1e-12))


def _forward_backward(
    window: Floats, mean_K: Floats, std_K: Floats, transition_KK: Floats, share_K: Floats
) -> tuple[float, Floats, Floats]:
    """Return the log-likelihood, state posteriors and expected jumps of a window.

    The posteriors are ``[S, K]``, the jumps ``[K, K]``.
    """
    log_density = -0.5 * ((window[:, None] - mean_K) / std_K) ** 2 - np.log(
        std_K * np.sqrt(2 * np.pi)
    )
    # Scaled by each step's best state, so that far outliers do not underflow in all states.
    peak = log_density.max(axis=1)
    density = np.exp(log_density - peak[:, None])
    n, k = density.shape
    alpha, beta, scale = np.empty((n, k)), np.ones((n, k)), np.empty(n)
    prior = share_K
    for t in range(n):
        row = prior * density[t]
        scale[t] = row.sum()
        alpha[t] = row / scale[t]
        prior = alpha[t] @ transition_KK
    for t in range(n - 2, -1, -1):
        beta[t] = transition_KK @ (density[t + 1] * beta[t + 1]) / scale[t + 1]
    ahead = density[1:] * beta[1:] / scale[1:, None]
    jumps = (alpha[:-1].T @ ahead) * transition_KK
    return float((np.log(scale) + peak).sum()), alpha * beta, jumps
