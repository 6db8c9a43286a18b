"""Laws for all nodes of a recording: pools, fitted, with ranks' spatial factors kept apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.forecast.distributions import Fit, fit
from prismscale.forecast.pools import Pool, pools_of, rank_factors
from prismscale.forecast.samples import StepSamples
from prismscale.forecast.sampling import NO_LAW, LawDraws, NodeLaw
from prismscale.graph.node import NodeKind

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class FittedPool:
    """A pool and its fit; ``law`` is the index of its law."""

    pool: Pool
    fit: Fit
    law: int


def fit_laws(samples: StepSamples) -> tuple[LawDraws, list[FittedPool]]:
    """Fit every pool of a recording; ranks' spatial factors are taken out first, and put back.

    Raises:
        FormatError: durations that are negative or not finite.
    """
    factor_R = rank_factors(samples)
    law_CB = [
        np.full(c.trace.n_body, NO_LAW, dtype=np.int64) for c in samples.graph.classes
    ]
    laws: list[NodeLaw] = []
    fitted: list[FittedPool] = []
    for pool in pools_of(samples):
        is_compute = pool.signature.kind == NodeKind.COMPUTE
        steadied = _without_factors(samples, pool, factor_R) if is_compute else pool.durations_ns
        if not steadied.any():
            continue
        chosen = fit(steadied, pool.name)
        for class_index, node in pool.nodes:
            law_CB[class_index][node] = len(laws)
        fitted.append(FittedPool(pool=pool, fit=chosen, law=len(laws)))
        key = "compute" if is_compute else "communication"
        laws.append(NodeLaw(name=pool.name, **{key: chosen.distribution}))
    small = sum("only" in f.fit.note for f in fitted)
    notes = (f"{small} of {len(fitted)} pools are too small to fit a law",) if small else ()
    draws = LawDraws(
        graph=samples.graph,
        laws=tuple(laws),
        law_CB=tuple(law_CB),
        factor_R=None if (factor_R == 1).all() else factor_R,
        notes=notes,
    )
    return draws, fitted


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
