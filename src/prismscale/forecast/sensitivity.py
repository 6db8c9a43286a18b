"""Which kernels and collectives to make steadier: the p95 of the step without their variation.

PRISM (arXiv 2510.15596) ranks by *ablated p95*: freeze one class of durations at its median, draw
again, and look at the p95. High variation off the critical path gains nothing, and contributions do
not add up. For the leading few, Sobol indices (:mod:`prismscale.forecast.sobol`) say how much of
the variance each explains.

All runs use common random numbers: durations that are not frozen keep their draws, so differences
are not noise of the drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prismscale.errors import UsageError
from prismscale.forecast.draws.executor import Executor
from prismscale.forecast.draws.lockstep import FusedGraph
from prismscale.forecast.draws.montecarlo import (
    Base,
    Draws,
    DrawSource,
    MonteCarlo,
    SteadyDraws,
    draw_each,
)
from prismscale.forecast.draws.replay import ReplayDraws
from prismscale.forecast.draws.sampling import DistributionDraws, fuse_distributions
from prismscale.forecast.modelled.profile_draws import SOURCES, ProfileDraws
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.pipeline import pipeline_places
from prismscale.progress import StageUpdate

Freeze = Callable[[Sequence[str]], DrawSource]
"""Returns the same draws with some factors frozen."""

ALL_STEPS = 0.95
"""Quantile of the step time that is compared."""
OTHERS = "other kernels"
TOGETHER = 16
"""Number of factors that are drawn as one list of tasks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ablation:
    """Effect of freezing one factor at its median."""

    name: str
    p50_ns: float
    p95_ns: float
    p95_gain: float
    """Share by which the p95 falls; negative where it rises."""
    std_gain: float
    """Share by which the standard deviation of the step falls."""


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Ablations, the largest gain first."""

    base_p50_ns: float
    base_p95_ns: float
    ablations: tuple[Ablation, ...]


def factors_of(
    source: DistributionDraws | ReplayDraws | SteadyDraws | ProfileDraws,
    fused: FusedGraph | None = None,
) -> tuple[list[str], Freeze]:
    """Return the names of what can be frozen, and the function that freezes.

    Names are those of each kernel and collective, and of each stage's computation. For a
    null-device run they are kinds of kernels, collectives by group, stages, and the sources of its
    profile.

    Args:
        fused: freeze in ``source``, the distributions of its origin, and then fuse.
    """
    if isinstance(source, SteadyDraws):
        raise UsageError("--variability none leaves nothing whose variation could be told")
    if isinstance(source, ProfileDraws):
        return _profile_factors(source)
    if isinstance(source, DistributionDraws):
        return _distribution_factors(source, fused)
    return _replay_factors(source)


def ablate(
    graph: JobGraph,
    names: Sequence[str],
    freeze: Freeze,
    config: MonteCarlo,
    *,
    base: Base | None = None,
    unfrozen: Draws | None = None,
    executor: Executor | None = None,
    progress: StageUpdate | None = None,
) -> Sensitivity:
    """Return the p95 with each factor frozen in turn.

    Args:
        base: run that draws continue from.
        unfrozen: draws of ``config`` with nothing frozen, if they are known.

    Raises:
        UsageError: a factor that does not exist.
    """
    nothing: list[tuple[str, ...]] = [()] if unfrozen is None else []
    asked = [*nothing, *((name,) for name in names)]
    drawn = _drawn_frozen(graph, asked, freeze, config, base, executor, progress)
    base_D = (next(drawn) if unfrozen is None else unfrozen).step_ns_D
    frozen_FD = [frozen.step_ns_D for frozen in drawn]
    p50, p95 = np.quantile(base_D, [0.5, ALL_STEPS])
    spread = float(base_D.std())
    found = []
    for name, steps_D in zip(names, frozen_FD, strict=True):
        frozen_p50, frozen_p95 = np.quantile(steps_D, [0.5, ALL_STEPS])
        found.append(
            Ablation(
                name=name,
                p50_ns=float(frozen_p50),
                p95_ns=float(frozen_p95),
                p95_gain=float(1 - frozen_p95 / p95),
                std_gain=float(1 - steps_D.std() / spread) if spread else 0.0,
            )
        )
    ordered = sorted(found, key=lambda a: -a.p95_gain)
    return Sensitivity(base_p50_ns=float(p50), base_p95_ns=float(p95), ablations=tuple(ordered))


def _drawn_frozen(
    graph: JobGraph,
    asked: Sequence[tuple[str, ...]],
    freeze: Freeze,
    config: MonteCarlo,
    base: Base | None,
    executor: Executor | None,
    progress: StageUpdate | None,
) -> Iterator[Draws]:
    """Yield the draws for each entry of ``asked``, with its factors frozen."""
    whole = len(asked) * config.draws
    # Not all at once: the frozen distributions of a large recording take much memory.
    for first in range(0, len(asked), TOGETHER):
        yield from draw_each(
            graph,
            [(freeze(own), base) for own in asked[first : first + TOGETHER]],
            config,
            executor=executor,
            progress=progress and _part_of(progress, first * config.draws, whole),
        )


def _part_of(progress: StageUpdate, before: int, whole: int) -> StageUpdate:
    """Return a callback that reports the progress of a part as that of the whole."""

    def update(done: int, total: int) -> None:
        progress(before + done, whole)

    return update


def distributions_by_factor(source: DistributionDraws) -> Mapping[str, set[int]]:
    """Return the indices of the distributions that belong to each factor.

    A distribution may belong to several.
    """
    used = set(np.concatenate(source.distribution_CB).tolist())
    found: dict[str, set[int]] = {}
    for i, distribution in enumerate(source.distributions):
        for name in distribution.factors or (distribution.name,):
            if i in used:
                found.setdefault(name, set()).add(i)
    return found


def _distribution_factors(
    source: DistributionDraws, fused: FusedGraph | None
) -> tuple[list[str], Freeze]:
    by_name = distributions_by_factor(source)

    def freeze(names: Sequence[str]) -> DrawSource:
        _check(names, by_name)
        left = source.freeze(frozenset().union(*(by_name[n] for n in names)))
        return left if fused is None else fuse_distributions(fused, left)

    return list(by_name), freeze


def _replay_names(source: ReplayDraws) -> Mapping[str, set[tuple[int, int]]]:
    """Return the (class, body node) pairs of each label, and of each stage's computation."""
    samples = source.samples
    found: dict[str, set[tuple[int, int]]] = {}
    stages = len(np.unique(samples.stage_R))
    varied = source.modelled if source.modelled_factor is not None else frozenset()
    for rank_class, own in zip(samples.graph.classes, samples.classes, strict=True):
        for b, ns_TX in enumerate(own.body_ns):
            if (ns_TX == ns_TX[0]).all() and (rank_class.index, b) not in varied:
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


def _profile_factors(source: ProfileDraws) -> tuple[list[str], Freeze]:
    kinds = {f"{kind} kernels": kind for kind in source.varying_kinds()}
    nodes = _profile_nodes_by_name(source)
    sources = {f"{name} variation": name for name in SOURCES if name not in source.off}

    def freeze(names: Sequence[str]) -> DrawSource:
        _check(names, {**kinds, **nodes, **sources})
        left = source.without(*(sources[n] for n in names if n in sources))
        still = frozenset().union(*(nodes[n] for n in names if n in nodes))
        return left.steadied(frozenset(kinds[n] for n in names if n in kinds), still)

    return [*kinds, *nodes, *sources], freeze


@dataclass(frozen=True, slots=True)
class _VaryingNode:
    """A node of a null-device run whose duration is drawn."""

    at: tuple[int, int]
    """(class, body node)."""
    stage: int
    op: str
    """Operation of a communication; empty for computation."""
    group: str


def _profile_nodes(source: ProfileDraws) -> Iterator[_VaryingNode]:
    graph = source.graph
    stage_R, _ = pipeline_places(graph)
    for rank_class in graph.classes:
        trace = rank_class.trace
        stage = int(stage_R[rank_class.members_M[0]])
        for b, computes in enumerate(trace.computes_B.tolist()):
            i, at = trace.n_prologue + b, (rank_class.index, b)
            if computes:
                yield _VaryingNode(at=at, stage=stage, op="", group="")
            elif trace.kind_N[i] != NodeKind.RECV:  # its duration is drawn at the sender
                op = CollectiveOp(int(trace.op_N[i])).spelling
                group = trace.groups[int(trace.group_index_N[i])].name or "group"
                yield _VaryingNode(at=at, stage=stage, op=op, group=group)


def _profile_nodes_by_name(source: ProfileDraws) -> Mapping[str, set[tuple[int, int]]]:
    """Return the (class, body node) pairs that share a name.

    These are the collectives of each group, and each stage's computation.
    """
    nodes = list(_profile_nodes(source))
    has_stages = len({node.stage for node in nodes}) > 1
    found: dict[str, set[tuple[int, int]]] = {}
    for node in nodes:
        if node.op:
            found.setdefault(f"{node.op} {node.group}", set()).add(node.at)
        elif has_stages:
            found.setdefault(f"stage {node.stage} computation", set()).add(node.at)
    return found


def classes_of(source: ProfileDraws) -> tuple[list[str], Freeze]:
    """Return what can be frozen of a null-device run, in the coarse classes that PRISM ranks.

    These are kernels of the kinds that the profile names, all other kernels together, and
    communications by operation, whatever their group.
    """
    kinds: dict[str, set[str]] = {}
    for kind in source.varying_kinds():
        name = f"{kind.replace('_', ' ')} kernels" if kind in source.profile.kernels else OTHERS
        kinds.setdefault(name, set()).add(kind)
    nodes: dict[str, set[tuple[int, int]]] = {}
    for node in _profile_nodes(source):
        if node.op:
            nodes.setdefault(node.op, set()).add(node.at)

    def freeze(names: Sequence[str]) -> DrawSource:
        _check(names, {**kinds, **nodes})
        return source.steadied(
            frozenset().union(*(kinds[n] for n in names if n in kinds)),
            frozenset().union(*(nodes[n] for n in names if n in nodes)),
        )

    return [*kinds, *nodes], freeze


def _check(names: Sequence[str], known: Mapping[str, object]) -> None:
    unknown = [n for n in names if n not in known]
    if unknown:
        raise UsageError(f"unknown {', '.join(unknown)}; there are: {', '.join(known)}")
