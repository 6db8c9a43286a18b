"""A job whose nodes are placed: its node slots, its nodes, and what placements cost.

Placements of a null-device run are compared by the step without other variation, many at once
(:mod:`.placed_steps`). Those of recorded durations are compared by a quantile of the same draws for
every placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.variability import VariabilityProfile
from prismscale.durations.samples import StepSamples
from prismscale.errors import UsageError
from prismscale.forecast.draws.executor import Executor
from prismscale.forecast.draws.montecarlo import Base, Draws, DrawSource, MonteCarlo, draw_each
from prismscale.forecast.draws.quotient import quotient_of
from prismscale.forecast.model import Model
from prismscale.forecast.modelled.profile_draws import SPATIAL, ProfileDraws
from prismscale.forecast.placement.node_placement import (
    Evaluator,
    HotNode,
    PlacedTail,
    PlacementStudy,
    hot_node_study,
    place,
)
from prismscale.forecast.placement.nodes import ClusterNode
from prismscale.forecast.placement.placed_steps import PlacedSteps
from prismscale.forecast.recording import Recording
from prismscale.graph.pipeline import pipeline_places
from prismscale.progress import StageUpdate

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class NodeSlots:
    """Slots that nodes are placed in. A slot holds neighbouring ranks.

    The slots of a replica are in the order of its stages.
    """

    ranks: tuple[tuple[int, ...], ...]
    replica_S: tuple[int, ...]

    @property
    def first(self) -> list[int]:
        """Slots of the first replica."""
        return [s for s, replica in enumerate(self.replica_S) if replica == self.replica_S[0]]


@dataclass(frozen=True, kw_only=True)
class Search:
    """How placements are searched."""

    rounds: int = 400
    """Number of placements that the search tries."""
    exhaustive: bool | None = None
    """True or False forces the choice. None: all placements are tried if they are few."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class PlacedJob:
    """A job whose nodes are placed."""

    recording: Recording
    model: Model
    slots: NodeSlots
    nodes: tuple[ClusterNode, ...]
    own_R: Floats
    """Factors that recorded durations already contain."""

    @property
    def is_modelled(self) -> bool:
        """Whether placements are compared by the run's own step, because durations are modelled."""
        return self.recording.modelled_job is not None

    def by_steps(
        self,
        search: Search,
        hot: list[float],
        progress: StageUpdate = lambda done, total: None,
    ) -> tuple[PlacementStudy, list[HotNode]]:
        """Search the placements of a null-device run, without other variation.

        Also returns the step with one hot node at each stage.
        """
        found = self.recording
        # Draws ranks that cannot differ as one: only the factors of their nodes tell ranks apart.
        small = quotient_of(found.samples, found.base, len(self.slots.ranks[0]))
        base, fused = (small.base, small.fused) if small else (found.base, None)
        costs = PlacedSteps(base, fused, self.slots.ranks, self.nodes)
        study = self._searched(costs, search, progress)
        if not hot:
            return study, []
        slots = self.slots.first
        return study, hot_node_study(
            costs.with_factors, len(self.slots.ranks), hot, node_slots=slots
        )

    def by_draws(
        self,
        search: Search,
        hot: list[float],
        progress: StageUpdate = lambda done, total: None,
        *,
        quantile: float,
        draws: int,
        steps: int | None,
    ) -> tuple[PlacementStudy, list[HotNode]]:
        """Search the placements of recorded durations, by a quantile of the same draws.

        Also returns the quantile with one hot node at each stage.
        """
        model, slots = self.model, self.slots
        evaluate = Evaluator(
            model.graph,
            lambda factor_R: model.slowed(factor_R / self.own_R),
            slots.ranks,
            self.nodes,
            draws=draws,
            seed=search.seed,
            quantile=quantile,
            steps=steps or model.steps,
        )
        study = self._searched(evaluate, search, progress)
        if not hot:
            return study, []
        return study, hot_node_study(
            lambda factor_PS: [evaluate.with_factors(factor_S) for factor_S in factor_PS],
            len(slots.ranks),
            hot,
            node_slots=slots.first,
        )

    def _searched(
        self, costs: PlacedSteps | Evaluator, search: Search, progress: StageUpdate
    ) -> PlacementStudy:
        return place(
            costs,
            self.nodes,
            self.slots.replica_S,
            seed=search.seed,
            rounds=search.rounds,
            exhaustive=search.exhaustive,
            progress=progress,
        )

    def tails(
        self,
        study: PlacementStudy,
        quantile: float,
        config: MonteCarlo,
        executor: Executor | None = None,
        progress: StageUpdate | None = None,
    ) -> tuple[PlacedTail, ...]:
        """Return how the step varies with each shown placement of a null-device run.

        The speed of devices does not vary, because it is known.
        """
        shown = {"given": study.given, "best": study.best, "worst": study.worst}
        factors = [[study.nodes[n].factor for n in placed.node_S] for placed in shown.values()]
        found = []
        every = self.drawn(factors, config, executor, progress)
        for (name, placed), drawn in zip(shown.items(), every, strict=True):
            p50, far = (drawn.quantile_ns(q) for q in (0.5, quantile))
            found.append(PlacedTail(name=name, step_ns=placed.step_ns, p50_ns=p50, far_ns=far))
        return tuple(found)

    def drawn(
        self,
        factors: Sequence[Sequence[float]],
        config: MonteCarlo,
        executor: Executor | None = None,
        progress: StageUpdate | None = None,
    ) -> list[Draws]:
        """Draw the steps of several null-device runs whose nodes are slow by the given factors.

        The factors of each run are by node slot. Its devices do not differ otherwise.
        """
        variants = [self._slowed(factor_S) for factor_S in factors]
        return draw_each(
            self.model.graph,
            variants,
            self.model.drawn(config),
            executor=executor,
            progress=progress,
        )

    def _slowed(self, factor_S: Sequence[float]) -> tuple[DrawSource, Base | None]:
        factor_R = np.ones(self.recording.samples.graph.world_size)
        for own, factor in zip(self.slots.ranks, factor_S, strict=True):
            factor_R[list(own)] = factor
        source, base = self.model.slowed(factor_R)
        return source.without(SPATIAL) if isinstance(source, ProfileDraws) else source, base


def node_slots(samples: StepSamples, ranks_per_node: int) -> NodeSlots:
    """Return slots of neighbouring ranks. Slots of a pipeline replica are in the order of its
    stages.

    Raises:
        UsageError: the ranks do not fill nodes.
    """
    world_size = samples.graph.world_size
    if ranks_per_node < 1 or world_size % ranks_per_node:
        raise UsageError(
            f"{world_size} ranks do not fill nodes of {ranks_per_node}: --ranks-per-node must be "
            f"1 or more, and divide {world_size}"
        )
    stage_R, replica_R = samples.stage_R, samples.replica_R
    if (stage_R < 0).any():
        stage_R, replica_R = pipeline_places(samples.graph)
    slots = [
        tuple(range(first, first + ranks_per_node))
        for first in range(0, world_size, ranks_per_node)
    ]
    # A slot that holds several replicas counts as part of its first rank's replica.
    slots.sort(key=lambda own: (int(replica_R[own[0]]), int(stage_R[own[0]])))
    replicas = (int(replica_R[own[0]]) for own in slots)
    return NodeSlots(ranks=tuple(slots), replica_S=tuple(replicas))


def ranks_of_a_node(found: Recording, given: int | None = None) -> int:
    """Return the number of ranks on a node.

    It is the given one; else the cluster's. It is 1 where no cluster is known, and on processors,
    whose cluster is one machine of any size.
    """
    if given is not None:
        return given
    if found.cluster is None or found.cluster.processor_communicates:
        return 1
    return min(found.cluster.devices_per_node, found.samples.graph.world_size)


def keeps_nodes_whole(found: Recording, slots: NodeSlots) -> bool:
    """Return whether ranks that are drawn as one sit in one slot.

    They do not where a node consists of several slots, or of parts of them.
    """
    return found.cluster is None or len(slots.ranks[0]) % found.cluster.devices_per_node == 0


def profile_of(found: Recording) -> VariabilityProfile:
    """Return the variability profile of a null-device run; of other runs, that of their cluster.

    Raises:
        UsageError: neither the run nor its cluster has one.
    """
    if found.modelled_job is not None:
        return found.modelled_job.profile
    if found.cluster is not None and found.cluster.variability:
        return VariabilityProfile.load(found.cluster.variability)
    raise UsageError(
        "--nodes profile: neither the run nor its cluster names a variability profile; give one "
        "(--variability measured), or a CSV"
    )
