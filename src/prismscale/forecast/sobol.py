"""Sobol indices: how much of the step's variance a factor explains.

The first-order index is that of the factor alone, the total index includes all its interactions.
Draws are made by pick-freeze (Saltelli et al., Computer Physics Communications 181(2), 2010,
section 4): the sample matrices A and B are two seeds, and a hybrid takes one factor's draws from
the other seed and leaves the rest. Estimators are those of table 2, (b) and (f) of the same paper.
SALib's (``pip install prismscale[sensitivity]``) can be chosen instead; they are the same
estimators on the same draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy
from numpy.typing import NDArray

from prismscale.durations.source import Duration, DurationSource
from prismscale.errors import UsageError
from prismscale.forecast.draws.executor import Executor
from prismscale.forecast.draws.montecarlo import (
    Chunk,
    DrawSource,
    LazyBody,
    MonteCarlo,
    draw_each,
    draw_steps,
)
from prismscale.forecast.draws.sampling import DistributionDraws
from prismscale.forecast.sensitivity import distributions_by_factor

Floats = NDArray[np.float64]

RESAMPLES = 200
LEVEL = 0.95
"""Confidence level of intervals."""
ESTIMATORS = ("own", "salib")


@dataclass(frozen=True, kw_only=True, slots=True)
class SobolIndex:
    """Shares of the step's variance that a factor explains."""

    name: str
    first: float
    """Share that the factor explains alone."""
    total: float
    """Share that it explains with all its interactions."""
    first_error: float = 0.0
    """Half the width of the 95 % interval."""
    total_error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PickFreeze:
    """Step times of the sample matrices. Axes: ``F`` factors, ``D`` draws."""

    names: tuple[str, ...]
    a_D: Floats
    b_D: Floats
    hybrid_FD: Floats
    """Like A, but with one factor as in B."""


def sobol_indices(
    source: DistributionDraws,
    names: Sequence[str],
    config: MonteCarlo,
    *,
    executor: Executor | None = None,
    estimator: str = "own",
) -> list[SobolIndex]:
    """Return first-order and total indices of some factors.

    This needs ``2 + factors`` runs of ``config.draws`` draws.

    Args:
        estimator: ``own`` or ``salib``.

    Raises:
        UsageError: a factor or estimator that does not exist, or SALib is not installed.
    """
    if estimator not in ESTIMATORS:
        raise UsageError(f"unknown estimator '{estimator}'; allowed: {', '.join(ESTIMATORS)}")
    estimate = salib_estimates if estimator == "salib" else own_estimates
    return estimate(pick_freeze(source, names, config, executor=executor), config.seed)


def pick_freeze(
    source: DistributionDraws,
    names: Sequence[str],
    config: MonteCarlo,
    *,
    executor: Executor | None = None,
) -> PickFreeze:
    """Draw the sample matrices.

    Raises:
        UsageError: a factor that does not exist.
    """
    other = replace(config, seed=config.seed + 1)
    marks = [_mark(source, name) for name in names]
    hybrids = [_TwoSeeds(base=source, marked=marked, seed=other.seed) for marked in marks]
    b = draw_steps(source.graph, source, other, executor=executor)
    a, *of_hybrids = draw_each(
        source.graph,
        [(source, None), *((hybrid, None) for hybrid in hybrids)],
        config,
        executor=executor,
    )
    hybrid_FD = np.zeros((len(names), config.draws))
    for row_D, drawn in zip(hybrid_FD, of_hybrids, strict=True):
        row_D[:] = drawn.step_ns_D
    return PickFreeze(
        names=tuple(names),
        a_D=a.step_ns_D.astype(np.float64),
        b_D=b.step_ns_D.astype(np.float64),
        hybrid_FD=hybrid_FD,
    )


def own_estimates(drawn: PickFreeze, seed: int = 0) -> list[SobolIndex]:
    """Return indices with bootstrap intervals."""
    # Centring does not change the expectation, and removes much of the noise.
    middle = np.concatenate([drawn.a_D, drawn.b_D, drawn.hybrid_FD.ravel()]).mean()
    a, b, hybrid = drawn.a_D - middle, drawn.b_D - middle, drawn.hybrid_FD - middle
    first_F, total_F = _indices(a, b, hybrid)
    rng = np.random.default_rng(seed)
    again = []
    for _ in range(RESAMPLES):
        pick = rng.integers(0, len(a), len(a))
        again.append(_indices(a[pick], b[pick], hybrid[:, pick]))
    first_error, total_error = scipy.stats.norm.ppf((1 + LEVEL) / 2) * np.std(again, axis=0, ddof=1)
    rows = zip(drawn.names, first_F, total_F, first_error, total_error, strict=True)
    return [_index(*row) for row in rows]


def salib_estimates(drawn: PickFreeze, seed: int = 0) -> list[SobolIndex]:
    """Return the same indices, computed by SALib (Iwanaga, Usher and Herman, SESMO 4, 2022).

    Raises:
        UsageError: SALib is not installed.
    """
    analyze = _import_salib()
    problem = {"num_vars": len(drawn.names), "names": list(drawn.names), "bounds": []}
    # SALib's order: for every draw A, then all hybrids, then B.
    ordered = np.vstack([drawn.a_D, drawn.hybrid_FD, drawn.b_D]).T.ravel()
    if ordered.std() == 0:
        return [SobolIndex(name=name, first=0.0, total=0.0) for name in drawn.names]
    found = analyze(
        problem,
        ordered,
        calc_second_order=False,
        num_resamples=RESAMPLES,
        conf_level=LEVEL,
        seed=seed,
    )
    columns = (found["S1"], found["ST"], found["S1_conf"], found["ST_conf"])
    return [_index(*row) for row in zip(drawn.names, *columns, strict=True)]


def _import_salib() -> Callable[..., dict[str, Floats]]:
    try:
        from SALib.analyze.sobol import analyze
    except ImportError as error:
        raise UsageError(
            "--estimator salib needs SALib: pip install 'prismscale[sensitivity]', or use "
            "--estimator own"
        ) from error
    found: Callable[..., dict[str, Floats]] = analyze
    return found


def _indices(a: Floats, b: Floats, hybrid_FD: Floats) -> tuple[Floats, Floats]:
    variance = float(np.concatenate([a, b]).var())
    if variance == 0:
        return np.zeros(len(hybrid_FD)), np.zeros(len(hybrid_FD))
    first = (b * (hybrid_FD - a)).mean(axis=1) / variance
    total = ((a - hybrid_FD) ** 2).mean(axis=1) / (2 * variance)
    return first, total


def _index(
    name: str, first: float, total: float, first_error: float, total_error: float
) -> SobolIndex:
    return SobolIndex(
        name=name,
        first=float(first),
        total=float(total),
        first_error=float(first_error),
        total_error=float(total_error),
    )


def _mark(source: DistributionDraws, name: str) -> tuple[NDArray[np.bool_], ...]:
    known = distributions_by_factor(source)
    if name not in known:
        raise UsageError(f"unknown {name}; there are: {', '.join(known)}")
    return tuple(
        np.isin(distribution_B, list(known[name])) for distribution_B in source.distribution_CB
    )


@dataclass(frozen=True, kw_only=True)
class _TwoSeeds:
    """Draws of one seed, except for some nodes, whose draws are of another seed."""

    base: DrawSource
    marked: tuple[NDArray[np.bool_], ...]
    """By class and body node: True where draws are of the other seed."""
    seed: int

    def chunk(self, chunk: Chunk) -> DurationSource:
        return _TwoSources(
            self.base.chunk(chunk), self.base.chunk(replace(chunk, seed=self.seed)), self.marked
        )


class _TwoSources:
    def __init__(
        self, one: DurationSource, other: DurationSource, marked: tuple[NDArray[np.bool_], ...]
    ) -> None:
        self._one, self._other, self._marked = one, other, marked

    def prologue(self, class_index: int) -> Sequence[Duration]:
        return self._one.prologue(class_index)

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        bodies = self._one.body(class_index, step), self._other.body(class_index, step)
        return _TwoBodies(bodies, self._marked[class_index])


class _TwoBodies(LazyBody):
    def __init__(
        self,
        bodies: tuple[Sequence[Duration], Sequence[Duration]],
        marked_B: NDArray[np.bool_],
    ) -> None:
        self._bodies, self._marked_B = bodies, marked_B

    def __len__(self) -> int:
        return len(self._marked_B)

    def draw(self, node: int) -> Duration:
        return self._bodies[int(self._marked_B[node])][node]
