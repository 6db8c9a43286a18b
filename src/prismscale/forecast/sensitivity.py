"""Which kernels and collectives to make steadier: what the p95 would be without their variation.

PRISM (arXiv 2510.15596) ranks by *ablated p95*: freeze one class of durations at its median, draw
again, and look at the p95. High variation off the critical path gains nothing, and contributions do
not add up. For the leading few, Sobol indices say how much of the variance each explains alone
(first order) and with all its interactions (total).

All runs use common random numbers: what is not frozen keeps its draws, so differences are not noise
of the drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import UsageError
from prismscale.forecast.executor import Executor
from prismscale.forecast.montecarlo import Chunk, DrawSource, LazyBody, MonteCarlo, draw_steps
from prismscale.forecast.replay import ReplayDraws
from prismscale.forecast.sampling import LawDraws
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import NodeKind
from prismscale.sim.engine import Duration, DurationSource

Floats = NDArray[np.float64]
Freeze = Callable[[Sequence[str]], DrawSource]
"""The same draws with some factors frozen."""

ALL_STEPS = 0.95
"""The quantile that counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """One factor frozen at its median."""

    name: str
    p50_ns: float
    p95_ns: float
    p95_gain: float
    """Share by which the p95 falls; negative where it rises."""
    std_gain: float
    """Share by which the standard deviation of the step falls."""


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Ablations in order of their gain."""

    base_p50_ns: float
    base_p95_ns: float
    ablations: tuple[Ablation, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SobolIndex:
    """How much of the step's variance a factor explains."""

    name: str
    first: float
    """Alone."""
    total: float
    """With all its interactions."""


def factors_of(source: LawDraws | ReplayDraws) -> tuple[list[str], Freeze]:
    """What can be frozen: each kernel and collective by label, and each stage's computation."""
    if isinstance(source, LawDraws):
        return _law_factors(source)
    return _replay_factors(source)


def ablate(
    graph: JobGraph,
    names: Sequence[str],
    freeze: Freeze,
    config: MonteCarlo,
    *,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """The p95 with each factor frozen in turn.

    Raises:
        UsageError: a factor that does not exist.
    """
    base_D = draw_steps(graph, freeze(()), config, executor=executor).step_ns_D
    p50, p95 = np.quantile(base_D, [0.5, ALL_STEPS])
    found = []
    for i, name in enumerate(names):
        steps_D = draw_steps(graph, freeze((name,)), config, executor=executor).step_ns_D
        frozen_p50, frozen_p95 = np.quantile(steps_D, [0.5, ALL_STEPS])
        spread = float(base_D.std())
        found.append(
            Ablation(
                name=name,
                p50_ns=float(frozen_p50),
                p95_ns=float(frozen_p95),
                p95_gain=float(1 - frozen_p95 / p95),
                std_gain=float(1 - steps_D.std() / spread) if spread else 0.0,
            )
        )
        if progress is not None:
            progress(i + 1, len(names))
    ordered = sorted(found, key=lambda a: -a.p95_gain)
    return Sensitivity(base_p50_ns=float(p50), base_p95_ns=float(p95), ablations=tuple(ordered))


def sobol_indices(
    graph: JobGraph,
    names: Sequence[str],
    freeze: Freeze,
    config: MonteCarlo,
    *,
    executor: Executor | None = None,
) -> list[SobolIndex]:
    """First-order and total indices by pick-freeze (Saltelli et al., CPC 181(2), 2010, table 2: b,
    f).

    The sample matrices A and B are two seeds; a hybrid takes one factor's draws from the other seed
    and leaves the rest. Needs ``2 + factors`` runs of ``config.draws`` draws.

    Raises:
        UsageError: draws that are not independent, or a factor that does not exist.
    """
    everything = freeze(())
    a = draw_steps(graph, everything, config, executor=executor).step_ns_D.astype(np.float64)
    other = replace(config, seed=config.seed + 1)
    b = draw_steps(graph, everything, other, executor=executor).step_ns_D.astype(np.float64)
    variance = float(np.concatenate([a, b]).var())
    found = []
    for name in names:
        mixed = _TwoSeeds(base=everything, marked=_mark(everything, name), seed=other.seed)
        ab = draw_steps(graph, mixed, config, executor=executor).step_ns_D.astype(np.float64)
        if variance == 0:
            found.append(SobolIndex(name=name, first=0.0, total=0.0))
            continue
        # Centred, which takes nothing from the expectation and much from the noise.
        first = float(((b - b.mean()) * (ab - a)).mean()) / variance
        total = float(((a - ab) ** 2).mean()) / (2 * variance)
        found.append(SobolIndex(name=name, first=first, total=total))
    return found


@dataclass(frozen=True, kw_only=True)
class _TwoSeeds:
    """Draws of one seed, but of some nodes from another."""

    base: DrawSource
    marked: tuple[NDArray[np.bool_], ...]
    """By class and body node: taken from the other seed."""
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


def _mark(source: DrawSource, name: str) -> tuple[NDArray[np.bool_], ...]:
    if not isinstance(source, LawDraws):
        raise UsageError(
            "Sobol indices need factors that are drawn independently; recorded steps keep them "
            "together: use --method laws, or --no-indices"
        )
    chosen = list(_laws_by_name(source)[name])
    return tuple(np.isin(law_B, chosen) for law_B in source.law_CB)


def _laws_by_name(source: LawDraws) -> Mapping[str, set[int]]:
    found: dict[str, set[int]] = {}
    for i, law in enumerate(source.laws):
        found.setdefault(law.name, set()).add(i)
    return found


def _law_factors(source: LawDraws) -> tuple[list[str], Freeze]:
    by_name = _laws_by_name(source)

    def freeze(names: Sequence[str]) -> DrawSource:
        _check(names, by_name)
        return source.freeze(frozenset().union(*(by_name[n] for n in names)))

    return list(by_name), freeze


def _replay_names(source: ReplayDraws) -> Mapping[str, set[tuple[int, int]]]:
    """(class, body node) of each label, and of each stage's computation."""
    samples = source.samples
    found: dict[str, set[tuple[int, int]]] = {}
    stages = len(np.unique(samples.stage_R))
    for rank_class, own in zip(samples.graph.classes, samples.classes, strict=True):
        for b, ns_TX in enumerate(own.body_ns):
            if (ns_TX == ns_TX[0]).all():
                continue
            signature = samples.signature(rank_class.index, b)
            found.setdefault(signature.label, set()).add((rank_class.index, b))
            if signature.kind == NodeKind.COMPUTE and stages > 1:
                name = f"stage {signature.stage} computation"
                found.setdefault(name, set()).add((rank_class.index, b))
    return found


def _replay_factors(source: ReplayDraws) -> tuple[list[str], Freeze]:
    by_name = _replay_names(source)

    def freeze(names: Sequence[str]) -> DrawSource:
        _check(names, by_name)
        return replace(source, frozen=frozenset().union(*(by_name[n] for n in names)))

    return list(by_name), freeze


def _check(names: Sequence[str], known: Mapping[str, object]) -> None:
    unknown = [n for n in names if n not in known]
    if unknown:
        raise UsageError(f"unknown {', '.join(unknown)}; there are: {', '.join(known)}")
