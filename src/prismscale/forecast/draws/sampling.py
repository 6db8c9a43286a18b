"""Draws from fitted distributions: each node's duration comes from the distribution of its pool.

Durations that belong together are drawn together. A collective is drawn once for all its members. A
regime is drawn once per step for all communication. A rank's spatial factor is not drawn at all,
because it persists. Each node of each class and step has its own random stream, so freezing one
pool leaves all other draws unchanged (common random numbers).

Axes: ``D`` draws, ``M`` members of a class, ``G`` groups of a family, ``B`` body nodes, ``K``
states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.source import Duration, DurationSource
from prismscale.errors import UsageError
from prismscale.forecast.distributions.duration_distribution import DurationDistribution, Empirical
from prismscale.forecast.draws.lockstep import FusedGraph
from prismscale.forecast.draws.montecarlo import Chunk, LazyBody
from prismscale.forecast.draws.quotient import factors_of_sets
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import NodeKind

Floats = NDArray[np.float64]

NO_DISTRIBUTION = -1
"""Distribution index of a node that takes no time."""
CHAIN_DRAWS = 2**16
"""Number of draws that represent the distribution of a fused chain. Quantiles beyond 1 - 1/65,536
are not resolved."""

REGIME_STREAM, NODE_STREAM = 0, 1


@dataclass(frozen=True, kw_only=True)
class NodeDistribution:
    """Distributions of a node's computation and communication. A fused chain has both."""

    name: str
    compute: DurationDistribution | None = None
    communication: DurationDistribution | None = None
    factor_K: Floats | None = None
    """Factor of each regime on the communication. None: regimes have no effect."""
    factors: tuple[str, ...] = ()
    """Names of the sensitivity factors that freeze this distribution. Empty: :attr:`name` is the
    only one."""

    def steady(self) -> NodeDistribution:
        """Return the same distribution without variation: its median, in every regime."""
        compute, communication = (
            Empirical(sorted_ns=one.quantile(np.array([0.5]))) if one is not None else None
            for one in (self.compute, self.communication)
        )
        return replace(self, compute=compute, communication=communication, factor_K=None)


@dataclass(frozen=True, kw_only=True)
class DistributionDraws:
    """Random durations of a graph, drawn from distributions (a :class:`DrawSource`)."""

    graph: JobGraph
    distributions: tuple[NodeDistribution, ...]
    distribution_CB: tuple[NDArray[np.int64], ...]
    """Index of each body node's distribution, by class; :data:`NO_DISTRIBUTION` for none."""
    factor_R: Floats | None = None
    """Spatial factor on each rank's computation. None: 1 on every rank."""
    regime_share_K: Floats | None = None
    """Probability of each regime. One is drawn per step, for all communication. None: there is a
    single regime."""
    once_G: tuple[NDArray[np.int64], ...] | None = None
    """For each family, the index of the draw that each of its groups takes. Groups that run in
    parallel through one cluster node find the network in the same state, so they share a draw.
    None: every group has its own draw."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.factor_R is not None and len(self.factor_R) != self.graph.world_size:
            raise UsageError(
                f"{len(self.factor_R)} speed factors for {self.graph.world_size} ranks"
            )

    def chunk(self, chunk: Chunk) -> DurationSource:
        """Return the durations of one chunk. See :class:`DrawSource`."""
        return _DistributionChunk(self, chunk)

    def freeze(self, distributions: frozenset[int]) -> DistributionDraws:
        """Return the same draws with some distributions held at their median."""
        kept = (
            distribution.steady() if i in distributions else distribution
            for i, distribution in enumerate(self.distributions)
        )
        return replace(self, distributions=tuple(kept))


class _DistributionChunk:
    def __init__(self, source: DistributionDraws, chunk: Chunk) -> None:
        self._source, self._chunk = source, chunk

    def prologue(self, class_index: int) -> Sequence[Duration]:
        return ()

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        return _DistributionBody(self._source, self._chunk, class_index, step)


class _DistributionBody(LazyBody):
    def __init__(
        self, source: DistributionDraws, chunk: Chunk, class_index: int, step: int
    ) -> None:
        self._source, self._chunk = source, chunk
        self._class_index, self._step = class_index, step
        self._distribution_B = source.distribution_CB[class_index]
        self._rank_class = source.graph.classes[class_index]
        self._regime_D = _draw_regime(source.regime_share_K, chunk, step)
        factor = source.factor_R
        self._factor_M = None if factor is None else factor[self._rank_class.members_M]

    def __len__(self) -> int:
        return len(self._distribution_B)

    def draw(self, node: int) -> Duration:
        index = int(self._distribution_B[node])
        if index == NO_DISTRIBUTION:
            return 0
        distribution = self._source.distributions[index]
        rng = self._chunk.generator(NODE_STREAM, self._class_index, self._step, node)
        width, share_G = self._columns(node)
        shape = (self._chunk.draws, width)
        total: Floats | float = 0.0
        if distribution.compute is not None:
            part = distribution.compute.sample(rng, shape)
            total = part if self._factor_M is None else part * self._factor_M
        if distribution.communication is not None:
            part = distribution.communication.sample(rng, shape)
            if self._regime_D is not None and distribution.factor_K is not None:
                part = part * distribution.factor_K[self._regime_D][:, None]
            total = total + part
        drawn = np.rint(total).astype(np.int64)
        return drawn if share_G is None or drawn.shape[1] == 1 else drawn.take(share_G, axis=1)

    def _columns(self, node: int) -> tuple[int, NDArray[np.int64] | None]:
        """Return how many draws a node needs, and which of them each group takes."""
        trace = self._rank_class.trace
        i = trace.n_prologue + node
        if trace.kind_N[i] == NodeKind.COMPUTE:
            return self._rank_class.size, None
        family = self._rank_class.slots[int(trace.group_index_N[i])].family
        if self._source.once_G is None:
            return self._source.graph.families[family].n_groups, None
        share_G = self._source.once_G[family]
        return int(share_G.max()) + 1, share_G


def _draw_regime(share_K: Floats | None, chunk: Chunk, step: int) -> NDArray[np.int64] | None:
    if share_K is None:
        return None
    rng = chunk.generator(REGIME_STREAM, step)
    return rng.choice(len(share_K), size=chunk.draws, p=share_K)


def fuse_distributions(
    fused: FusedGraph, source: DistributionDraws, *, seed: int = 0
) -> DistributionDraws:
    """Return the distributions of the fused graph.

    The distribution of a chain is simulated once from those of its nodes, with :data:`CHAIN_DRAWS`
    draws, and then sampled. This is exact where members draw independently and the ranks of a set
    have the same spatial factor (they sit on one node).

    Raises:
        UsageError: ranks of one lockstep set have different spatial factors.
    """
    factor_S = _factors_of_sets(fused, source.factor_R)
    distributions: list[NodeDistribution] = []
    known: dict[tuple[tuple[int, bool], ...], int] = {}
    distribution_CB = []
    for index, own in enumerate(fused.classes):
        distribution_B = np.full(len(own.chains), NO_DISTRIBUTION, dtype=np.int64)
        for b, chain in enumerate(own.chains):
            parts = [
                (int(source.distribution_CB[index][n]), fused.is_compute(index, n)) for n in chain
            ]
            # Computation without a distribution adds no time. A collective without one still ends a
            # segment.
            key = tuple(p for p in parts if p[0] != NO_DISTRIBUTION or not p[1])
            if all(distribution == NO_DISTRIBUTION for distribution, _ in key):
                continue
            if key not in known:
                known[key] = len(distributions)
                rng = np.random.default_rng([seed, len(distributions)])
                # The chain is a single communication: nothing was fused.
                single = len(chain) == 1 and not fused.is_compute(index, chain[0])
                distributions.append(
                    _tabulated(source.distributions[key[0][0]])
                    if single
                    else _chain_distribution(source, key, fused.set_size, rng)
                )
            distribution_B[b] = known[key]
        distribution_CB.append(distribution_B)
    return DistributionDraws(
        graph=fused.graph,
        distributions=tuple(distributions),
        distribution_CB=tuple(distribution_CB),
        factor_R=factor_S,
        regime_share_K=source.regime_share_K,
        notes=source.notes,
    )


def _chain_distribution(
    source: DistributionDraws,
    parts: tuple[tuple[int, bool], ...],
    set_size: int,
    rng: np.random.Generator,
) -> NodeDistribution:
    compute = np.zeros(CHAIN_DRAWS)
    communication = np.zeros(CHAIN_DRAWS)
    segment: Floats | None = None
    for distribution_index, is_compute in parts:
        distribution = (
            source.distributions[distribution_index]
            if distribution_index != NO_DISTRIBUTION
            else None
        )
        if is_compute and distribution is not None and distribution.compute is not None:
            drawn = distribution.compute.sample(rng, (set_size, CHAIN_DRAWS))
            segment = drawn if segment is None else segment + drawn
            continue
        if segment is not None:
            compute += segment.max(axis=0)
            segment = None
        if distribution is not None and distribution.communication is not None:
            communication += distribution.communication.sample(rng, (CHAIN_DRAWS,))
    if segment is not None:
        compute += segment.max(axis=0)
    name = next(source.distributions[i].name for i, _ in parts if i != NO_DISTRIBUTION)
    if source.regime_share_K is None and source.factor_R is None:
        # No factor scales only computation or only communication, so one draw can hold their sum.
        return NodeDistribution(
            name=name, compute=Empirical(sorted_ns=np.sort(compute + communication))
        )
    return NodeDistribution(
        name=name,
        compute=Empirical(sorted_ns=np.sort(compute)) if compute.any() else None,
        communication=Empirical(sorted_ns=np.sort(communication)) if communication.any() else None,
        factor_K=_mean_factor([source.distributions[i] for i, _ in parts if i != NO_DISTRIBUTION]),
    )


def _mean_factor(distributions: list[NodeDistribution]) -> Floats | None:
    """Return the regimes' factors on a sum of communications, each weighted by its median."""
    at = np.array([0.5])
    found = [
        (float(distribution.communication.quantile(at)[0]), distribution.factor_K)
        for distribution in distributions
        if distribution.communication is not None and distribution.factor_K is not None
    ]
    if not found:
        return None
    weight = np.array([w for w, _ in found])
    return np.asarray(weight @ np.stack([factor_K for _, factor_K in found]) / weight.sum())


def _tabulated(distribution: NodeDistribution) -> NodeDistribution:
    """Return the same distribution, tabulated at :data:`CHAIN_DRAWS` evenly spaced quantiles.

    Sampling is then a fast table lookup.
    """
    at = (np.arange(CHAIN_DRAWS) + 0.5) / CHAIN_DRAWS
    compute, communication = (
        Empirical(sorted_ns=one.quantile(at)) if one is not None else None
        for one in (distribution.compute, distribution.communication)
    )
    return replace(distribution, compute=compute, communication=communication)


def _factors_of_sets(fused: FusedGraph, factor_R: Floats | None) -> Floats | None:
    if factor_R is None:
        return None
    factor_S = factors_of_sets(fused, factor_R)
    if factor_S is None:
        raise UsageError(
            "ranks of one lockstep set differ in speed; give one speed for each set, or draw every "
            "rank for itself"
        )
    return factor_S
