"""Fitted distributions for all nodes of a recording, with ranks' spatial factors kept apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.samples import StepSamples
from prismscale.forecast.distributions.duration_distribution import Fit, fit
from prismscale.forecast.distributions.pools import Pool, pools_of, rank_factors
from prismscale.forecast.draws.replay import regimes_of
from prismscale.forecast.draws.sampling import NO_DISTRIBUTION, DistributionDraws, NodeDistribution
from prismscale.forecast.draws.variation import Variation
from prismscale.graph.node import NodeKind

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class FittedPool:
    """A pool and its fit; ``distribution`` is the index of its distribution."""

    pool: Pool
    fit: Fit
    distribution: int


MODELLED = "modelled, not measured"


def fit_distributions(
    samples: StepSamples,
    *,
    modelled: frozenset[tuple[int, int]] = frozenset(),
    variation: Variation | None = None,
) -> tuple[DistributionDraws, list[FittedPool]]:
    """Fit a distribution to every pool of a recording.

    Ranks' spatial factors and the effects of regimes on each pool of communication are taken out
    before the fit. The draws put them back.

    Args:
        modelled: (class, body node) pairs of communication whose time comes from a model.
        variation: how much modelled communication varies; None: the default. Where its groups
            differ, the slowest one's time is used for all.

    Raises:
        FormatError: durations are negative or not finite.
    """
    factor_R = rank_factors(samples)
    regime_T = regimes_of(samples)
    n_regimes = int(regime_T.max()) + 1
    distribution_CB = [
        np.full(c.trace.n_body, NO_DISTRIBUTION, dtype=np.int64) for c in samples.graph.classes
    ]
    distributions: list[NodeDistribution] = []
    fitted: list[FittedPool] = []
    for pool in pools_of(samples):
        # Nodes that take no time keep NO_DISTRIBUTION.
        if not pool.durations_ns.any():
            continue
        if modelled.issuperset(pool.nodes):
            chosen, factor_K = _modelled(pool, variation or Variation()), None
        else:
            chosen, factor_K = _fitted(samples, pool, factor_R, regime_T)
        for class_index, node in pool.nodes:
            distribution_CB[class_index][node] = len(distributions)
        fitted.append(FittedPool(pool=pool, fit=chosen, distribution=len(distributions)))
        is_compute = pool.signature.kind == NodeKind.COMPUTE
        distributions.append(
            NodeDistribution(
                name=pool.name,
                compute=chosen.distribution if is_compute else None,
                communication=None if is_compute else chosen.distribution,
                factor_K=factor_K,
                factors=_factors(pool, samples),
            )
        )
    small = sum("only" in f.fit.note for f in fitted)
    notes = (
        (f"{small} of {len(fitted)} pools are too small to fit a distribution",) if small else ()
    )
    draws = DistributionDraws(
        graph=samples.graph,
        distributions=tuple(distributions),
        distribution_CB=tuple(distribution_CB),
        factor_R=None if (factor_R == 1).all() else factor_R,
        regime_share_K=np.bincount(regime_T) / len(regime_T) if n_regimes > 1 else None,
        notes=notes,
    )
    return draws, fitted


def _modelled(pool: Pool, variation: Variation) -> Fit:
    distribution = variation.communication(float(pool.durations_ns.max()))
    return Fit(distribution=distribution, ks=0.0, n=0, note=MODELLED)


def _fitted(
    samples: StepSamples, pool: Pool, factor_R: Floats, regime_T: NDArray[np.int64]
) -> tuple[Fit, Floats | None]:
    """Fit a pool after taking out spatial factors (computation) or regimes (communication).

    Returns:
        The fit, and each regime's factor on the pool. None: regimes have no effect.
    """
    if pool.signature.kind == NodeKind.COMPUTE:
        return fit(_without_factors(samples, pool, factor_R), pool.name), None
    factor_K, steadied = _without_regimes(samples, pool, regime_T)
    return fit(steadied, pool.name), factor_K


def _factors(pool: Pool, samples: StepSamples) -> tuple[str, ...]:
    """Name a pool's factors: a kernel's label and stage, or a communication's label and group."""
    s = pool.signature
    if s.kind != NodeKind.COMPUTE:
        return (f"{s.label} {s.group or 'group'}×{s.group_size}",)
    if samples.stage_R.max() < 1:
        return (s.label,)
    return s.label, f"stage {s.stage} computation"


def _without_regimes(
    samples: StepSamples, pool: Pool, regime_T: NDArray[np.int64]
) -> tuple[Floats | None, Floats]:
    """Return each regime's factor on the pool's median, and the durations without it."""
    if not regime_T.any():
        return None, pool.durations_ns
    arrays = [samples.classes[c].body_ns[n].astype(np.float64) for c, n in pool.nodes]
    usual = float(np.median(pool.durations_ns))
    if usual == 0:
        return None, pool.durations_ns
    factor_K = np.array(
        [
            np.median(np.concatenate([a[regime_T == k].ravel() for a in arrays])) / usual
            for k in range(int(regime_T.max()) + 1)
        ]
    )
    # In a regime in which the pool took no time, there is nothing to scale back.
    scale_T1 = np.where(factor_K > 0, factor_K, 1.0)[regime_T][:, None]
    return factor_K, np.concatenate([(a / scale_T1).ravel() for a in arrays])


def _without_factors(samples: StepSamples, pool: Pool, factor_R: Floats) -> Floats:
    parts = []
    for class_index, node in pool.nodes:
        own = samples.classes[class_index]
        ns_TX = own.body_ns[node]
        factor_X = np.ones(ns_TX.shape[1])
        factor_X[own.column_M % ns_TX.shape[1]] = factor_R[
            samples.graph.classes[class_index].members_M
        ]
        parts.append((ns_TX / factor_X).ravel())
    return np.concatenate(parts)
