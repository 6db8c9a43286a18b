"""Draws around modelled durations, by a variability profile (a :class:`DrawSource`).

A draw is a run: devices (*spatial*) and links keep their own speed through all of its steps. In
each step

- every kernel is drawn on every rank, and a node of the graph gets the sum of its kernels
  (*temporal*);
- every communication is drawn once for each group (*links*);
- machines stop for a moment, and now and then one stops for seconds (*stalls*);
- one pace holds for all ranks, and one for all communication between nodes (*regimes*).

Each source has its own random streams: switching one off leaves the draws of the others unchanged.
A member of the drawn graph may stand for a set of ranks (:mod:`.lockstep_sets`).

Array axes: ``D`` draws, ``M`` members of a class, ``K`` ranks of a member, ``G`` groups of a
family, ``B`` body nodes, ``R`` ranks of the whole job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from prismscale.cost.variability import NVLINK, KernelVariation, LinkVariation, VariabilityProfile
from prismscale.durations.composition import Composition
from prismscale.durations.source import Duration, DurationSource, slowed
from prismscale.errors import UsageError
from prismscale.forecast.draws.montecarlo import Chunk, LazyBody
from prismscale.forecast.modelled.device_speeds import (
    SlowestOfSets,
    Slowness,
    largest_of_equal,
    slowness,
)
from prismscale.forecast.modelled.link_factors import Crossing, Factors, crossing, largest
from prismscale.forecast.modelled.node_stalls import Delays, StepStalls
from prismscale.graph.channels import ChannelKey, ClassChannels
from prismscale.graph.job_graph import JobGraph, RankClass

Floats = NDArray[np.float64]

TEMPORAL, SPATIAL, LINKS, STALLS, REGIMES = SOURCES = (
    "temporal",
    "spatial",
    "links",
    "stalls",
    "regimes",
)
"""Sources of variation in a profile. Each can be switched off."""
LEAST_FACTOR = np.float32(0.1)
MOST_CACHED_BYTES = 1 << 26
"""Bytes of factors that a class keeps for nodes of equal kernels; others are computed anew."""
"""Smallest factor on a computation: devices differ, but not by more than this."""
_KERNELS, _DEVICES, _MESSAGES, _TAILS, _PAIRS, _MACHINES, _PACE, _DAY, _LONG = range(9)
"""Keys of the random streams."""


@dataclass(frozen=True, kw_only=True)
class ProfileDraws:
    """Durations of one step without variation, and how much they vary."""

    graph: JobGraph
    """Graph whose members stand for one rank each, or for a set of ranks."""
    plain: DurationSource
    """Durations of :attr:`graph` without variation, the same in every step."""
    profile: VariabilityProfile
    compositions: tuple[Composition, ...]
    """Kernels that the durations consist of, by class."""
    ranks_CKM: tuple[NDArray[np.int64], ...]
    """For each class, the ranks of the whole job that each member stands for."""
    groups_FKG: tuple[NDArray[np.int64], ...]
    """For each family, global ranks of groups of the whole job: one for each of :attr:`graph`."""
    parallel_F: tuple[int, ...]
    """For each family, the number of groups of the whole job that one group stands for."""
    devices_per_node: int
    step_ns: int
    """Step time without variation."""
    nodes_per_domain: int = 1
    """Number of nodes that NVLink connects."""
    factor_R: Floats | None = None
    """Further factor on the computation of each rank of :attr:`graph`."""
    off: frozenset[str] = frozenset()
    """Sources of :data:`SOURCES` that are switched off."""
    still: frozenset[tuple[int, int]] = frozenset()
    """(class, body node) pairs held at their median; regimes still affect them."""

    def __post_init__(self) -> None:
        unknown = self.off - set(SOURCES)
        if unknown:
            raise UsageError(
                f"unknown source {', '.join(sorted(unknown))}; allowed: {', '.join(SOURCES)}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks of the whole job."""
        return sum(ranks_KM.size for ranks_KM in self.ranks_CKM)

    def chunk(self, chunk: Chunk) -> DurationSource:
        """Return the durations of one chunk. See :class:`DrawSource`."""
        return _ProfileChunk(self, chunk)

    def without(self, *sources: str) -> ProfileDraws:
        """Return the same draws without some sources of variation."""
        return replace(self, off=self.off | set(sources))

    def steadied(
        self, kinds: frozenset[str], nodes: frozenset[tuple[int, int]] = frozenset()
    ) -> ProfileDraws:
        """Return the same draws with some kinds of kernels and some nodes held at their median."""
        of_kind = {
            kind: self.profile.kernel(kind) for own in self.compositions for kind in own.kinds
        }
        kernels = {k: KernelVariation() if k in kinds else v for k, v in of_kind.items()}
        profile = replace(self.profile, kernels=kernels)
        return replace(self, profile=profile, still=self.still | nodes)

    def varying_kinds(self) -> list[str]:
        """Return the kinds of kernels that the job runs and that vary."""
        found: dict[str, None] = {}
        for own in self.compositions:
            for kind, share in zip(own.kinds, own.share_BK.sum(axis=0).tolist(), strict=True):
                varies = self.profile.kernel(kind)
                if share and (varies.temporal_cv or varies.spatial_cv):
                    found[kind] = None
        return sorted(found)

    def link(self, scope: str) -> LinkVariation:
        """Return how much links of a scope vary: not at all if links are switched off."""
        return LinkVariation() if LINKS in self.off else self.profile.link(scope)


class _ProfileChunk:
    """State that all classes and steps of a chunk share."""

    def __init__(self, source: ProfileDraws, chunk: Chunk) -> None:
        self.source, self.chunk = source, chunk
        self.classes = [_ClassDraws(self, c) for c in source.graph.classes]
        self._day_D1 = self._day()
        self._paces: dict[int, tuple[Factors, Factors]] = {}
        self._stalls: dict[int, StepStalls] = {}
        self._pairs: dict[ChannelKey, tuple[Crossing, Factors | float]] = {}
        self._slowness_DR: Slowness | None = None

    def prologue(self, class_index: int) -> Sequence[Duration]:
        return ()

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        return _ProfileBody(self, self.classes[class_index], step)

    def slowness_of(self, ranks_KM: NDArray[np.int64]) -> Slowness:
        """Return the slowness ``[D, K, M]`` of the devices of ranks.

        All devices are drawn at once, because devices of one node have part of it in common.
        """
        source = self.source
        if self._slowness_DR is None:
            node_R = np.arange(source.world_size) // source.devices_per_node
            rng, share = self.chunk.generator(_DEVICES), source.profile.node_share
            self._slowness_DR = slowness(rng, self.chunk.draws, node_R, share)
        return self._slowness_DR[:, ranks_KM]

    def pace(self, step: int) -> tuple[Factors, Factors]:
        """Return a step's factors ``[D, 1]`` on everything and on communication between nodes."""
        if step not in self._paces:
            self._paces[step] = self._pace(step)
        return self._paces[step]

    def _pace(self, step: int) -> tuple[Factors, Factors]:
        source, regimes = self.source, self.source.profile.regimes
        ones = np.ones((self.chunk.draws, 1), dtype=np.float32)
        if REGIMES in source.off:
            return ones, ones
        rng = self.chunk.generator(_PACE, step)
        cv = regimes.step_cv(source.step_ns / 1e9)
        own = np.exp(cv * ndtri(_strata(rng, self.chunk.draws))) * self._day_D1
        between = np.exp(regimes.communication_cv * ndtri(_strata(rng, self.chunk.draws)))
        return own.astype(np.float32), between.astype(np.float32)

    def _day(self) -> Floats:
        """Return the factor ``[D, 1]`` of the time of day at which each run is."""
        turn_D1 = _strata(self.chunk.generator(_DAY), self.chunk.draws)
        return 1 + self.source.profile.regimes.day_amplitude * np.sin(2 * np.pi * turn_D1)

    def stalls(self, step: int) -> StepStalls:
        """Return the stalls of all machines in one step."""
        if step not in self._stalls:
            source, own = self.source, self.source.profile.stalls
            machines = -(-source.world_size // source.devices_per_node)
            hours = 0.0 if STALLS in source.off else source.step_ns / 3600e9

            def drawn(stream: int, per_hour: float, mean_s: float) -> StepStalls:
                return StepStalls.drawn(
                    self.chunk.generator(stream, step),
                    expected=per_hour * hours,
                    mean_s=mean_s,
                    draws=self.chunk.draws,
                    machines=machines,
                )

            short = drawn(_MACHINES, own.per_node_hour * machines, own.mean_s)
            long = drawn(_LONG, own.long_per_job_hour, own.long_mean_s)
            self._stalls[step] = short.and_also(long)
        return self._stalls[step]

    def crossing(self, key: ChannelKey) -> tuple[Crossing, Factors | float]:
        """Return what a channel crosses, and its links' factor for the whole run: ``[D, G]``."""
        if key not in self._pairs:
            source = self.source
            groups_KG = source.groups_FKG[key.family]
            ranks_KG = groups_KG[[key.source, key.destination]] if key.is_p2p else groups_KG
            parallel = source.parallel_F[key.family]
            per_domain = source.devices_per_node * source.nodes_per_domain
            per_pod = max(1, source.profile.pod_nodes // source.nodes_per_domain)
            own = crossing(ranks_KG, parallel, per_domain, per_pod)
            cv = source.link(own.scope).pair_cv
            factor: Factors | float = 1.0
            if cv:
                rng = self.chunk.generator(_PAIRS, *(part + 1 for part in key))
                shape = (self.chunk.draws, ranks_KG.shape[1])
                factor = 1 + np.float32(cv) * largest(rng, own.links * own.parallel, shape)
            self._pairs[key] = own, factor
        return self._pairs[key]


def _strata(rng: np.random.Generator, draws: int) -> Floats:
    """Draw one uniform number from each of ``draws`` equal parts of 0 … 1, in random order.

    [Note: strata] Some random numbers hold for the whole job, such as the pace of a step. They
    cause most of the step's variation, and nothing in the job averages them out. Drawn
    independently, they move the median of 200 steps by 0.2 % from seed to seed. Each value of a
    stratified sample has the same distribution, and quantiles of all values have almost no error
    (Latin hypercube sampling: McKay, Beckman, Conover, Technometrics 21(2), 1979). Intervals that
    take draws to be independent are too wide.

    Returns:
        ``[D, 1]``.
    """
    parts_D1 = rng.permutation(draws)[:, None] + rng.random((draws, 1))
    # 0 itself has no normal quantile.
    return np.maximum(parts_D1 / draws, np.finfo(np.float64).tiny)


class _ClassDraws:
    """One class in one chunk: the values that hold for all of its steps."""

    def __init__(self, parent: _ProfileChunk, rank_class: RankClass) -> None:
        source = parent.source
        self._parent, self.rank_class = parent, rank_class
        self.index = rank_class.index
        self.ranks_KM = source.ranks_CKM[self.index]
        self.channels = ClassChannels(source.graph, rank_class)
        self.computes_B = rank_class.trace.computes_B.tolist()
        self.still_B = [(self.index, b) in source.still for b in range(len(self.computes_B))]
        own = source.compositions[self.index]
        variations = [source.profile.kernel(kind) for kind in own.kinds]
        cv_K2 = np.array([(v.spatial_cv, v.temporal_cv) for v in variations], dtype=np.float64)
        # Reshaped, because a class that launches no kernel has no kinds.
        spatial_K, temporal_K = cv_K2.reshape(-1, 2).T
        temporal_B = np.sqrt(own.square_BK @ np.square(temporal_K))
        if SPATIAL in source.off:
            spatial_K = np.zeros_like(spatial_K)
        self.works_B: list[bool] = np.any(own.square_BK, axis=1).tolist()
        if TEMPORAL in source.off:
            temporal_B = np.zeros_like(temporal_B)
        # Rounded, so that nodes of equal kernels share one cached result.
        self.spatial_B = np.round(own.share_BK @ spatial_K, 6).tolist()
        self.temporal_B = np.round(temporal_B, 6).tolist()
        self.base = self._base(source)
        self._slowest: SlowestOfSets | None = None
        self._factors: dict[tuple[float, float], tuple[Factors | float, Factors | float]] = {}
        self._cached_bytes = 0

    def _base(self, source: ProfileDraws) -> Sequence[Duration]:
        base = source.plain.body(self.index, 0)
        if source.factor_R is None:
            return base
        return slowed(
            base, self.rank_class.trace.computes_B, source.factor_R[self.rank_class.members_M]
        )

    def factors(self, node: int) -> tuple[Factors | float, Factors | float]:
        """Return the mean and the standard deviation of a computation's factor over executions.

        Each is ``[D, M]`` or one number.
        """
        key = self.spatial_B[node], self.temporal_B[node]
        known = self._factors.get(key)
        if known is None:
            known = self._of_sets(*key)
            if self._cached_bytes < MOST_CACHED_BYTES:
                self._factors[key] = known
                self._cached_bytes += sum(np.asarray(part).nbytes for part in known)
        return known

    def _of_sets(self, spatial: float, temporal: float) -> tuple[Factors | float, Factors | float]:
        if not spatial:
            mean, deviation = largest_of_equal(len(self.ranks_KM))
            return 1 + temporal * mean, temporal * deviation
        if self._slowest is None:
            slowness_DKM = self._parent.slowness_of(self.ranks_KM)
            self._slowest = SlowestOfSets(slowness_DKM=slowness_DKM)
        mean_DM, deviation_DM = self._slowest.at(temporal / spatial)
        # Without the limit, devices of a very uneven fleet could take no time at all.
        own_DM: Factors = np.maximum(1 + np.float32(spatial) * mean_DM, LEAST_FACTOR)
        return own_DM, spatial * deviation_DM

    def delays(self, step: int) -> Delays:
        """Return the delays of the class's members by the stalls of one step."""
        machine_M = self.ranks_KM[0] // self._parent.source.devices_per_node
        return self._parent.stalls(step).delays(machine_M, *self._work)

    @cached_property
    def _work(self) -> tuple[NDArray[np.int64], Floats]:
        """Nodes (N) that work, and the share of the work that is done when each of them ends."""
        nodes = np.flatnonzero(self.works_B)
        time_N = np.array([np.max(self.base[b]) for b in nodes.tolist()], dtype=np.float64)
        return nodes, np.cumsum(time_N) / max(float(time_N.sum()), 1.0)


class _ProfileBody(LazyBody):
    """One step of one class.

    Nodes must be drawn in ascending order, each once, as the engine asks for them: random streams
    continue from node to node.
    """

    def __init__(self, parent: _ProfileChunk, own: _ClassDraws, step: int) -> None:
        self._parent, self._own = parent, own
        source, chunk = parent.source, parent.chunk
        self._source, self._draws = source, chunk.draws
        self._kernels, self._messages, self._tails = (
            chunk.generator(stream, own.index, step) for stream in (_KERNELS, _MESSAGES, _TAILS)
        )
        self._pace_D1, self._between_D1 = parent.pace(step)
        self._delays = own.delays(step)
        self._chance = TEMPORAL not in source.off
        self._drawn_DM = np.empty((chunk.draws, own.rank_class.size), dtype=np.float32)

    def __len__(self) -> int:
        return len(self._own.base)

    def draw(self, node: int) -> Duration:
        base = self._own.base[node]
        if type(base) is int and base == 0:
            return 0
        if not self._own.computes_B[node]:
            return self._communication(node, base)
        drawn = self._computation(node, base)
        for rows, members, delay in self._delays.get(node, ()):
            drawn = np.array(np.broadcast_to(drawn, self._drawn_DM.shape))
            np.add.at(drawn, (rows, members), delay)
        return drawn

    def _computation(self, node: int, base: Duration) -> Duration:
        own, drawn_DM = self._own, self._drawn_DM
        usual = self._pace_D1 * base
        varies = own.works_B[node] and self._chance
        if varies:
            # Drawn even where it is not used, so that freezing one kind of kernels leaves the draws
            # of the others as they are.
            self._kernels.standard_normal(out=drawn_DM, dtype=np.float32)
        if own.still_B[node]:
            return usual.astype(np.int64)
        factor, deviation = own.factors(node)
        if not varies:
            return (usual * factor).astype(np.int64)
        drawn_DM *= deviation
        drawn_DM += factor
        # float32 resolves 1 part in 16 million: 60 ns in a second.
        drawn_DM *= usual
        return np.maximum(drawn_DM, 0, out=drawn_DM).astype(np.int64)

    def _communication(self, node: int, base: Duration) -> Duration:
        source, own = self._source, self._own
        key = own.channels.of(own.rank_class.trace.n_prologue + node)
        crossed, pairs_DG = self._parent.crossing(key)
        link = source.link(crossed.scope)
        shape = (self._draws, source.graph.families[key.family].n_groups)
        usual = self._pace_D1 * base
        if crossed.scope != NVLINK:
            usual = usual * self._between_D1
        temporal_DG: Factors | float = 1.0
        if link.temporal_cv:
            temporal_DG = largest(self._messages, crossed.parallel, shape)
            temporal_DG *= np.float32(link.temporal_cv)
            temporal_DG += np.float32(1)
        tails = self._tail(link, crossed.parallel, shape)
        if own.still_B[node]:
            return usual.astype(np.int64)
        drawn = usual * pairs_DG * temporal_DG
        if tails is not None:
            at, factor = tails
            drawn = np.array(np.broadcast_to(drawn, shape))
            drawn[at] *= factor
        return np.maximum(drawn, 0).astype(np.int64)

    def _tail(
        self, link: LinkVariation, parallel: int, shape: tuple[int, int]
    ) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], Floats] | None:
        """Return draws and groups whose communication stalls, and how many times longer it is."""
        if not link.tail_probability:
            return None
        count = int(self._tails.binomial(shape[0] * shape[1] * parallel, link.tail_probability))
        if not count:
            return None
        at = self._tails.integers(0, shape[0], count), self._tails.integers(0, shape[1], count)
        least = (1 + link.tail_factor) / 2
        return at, least + self._tails.exponential(link.tail_factor - least, count)
