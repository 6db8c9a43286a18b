"""A null-device run as it is drawn: its durations, their kernels, and how much they vary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.variability import VariabilityProfile
from prismscale.durations.composition import Composition
from prismscale.forecast.draws.lockstep import FusedGraph
from prismscale.forecast.draws.montecarlo import Base
from prismscale.forecast.draws.quotient import (
    QuotientDurations,
    factors_of_sets,
    first_of_each,
)
from prismscale.forecast.modelled.lockstep_sets import lockstep_sets
from prismscale.forecast.modelled.profile_draws import ProfileDraws
from prismscale.graph.job_graph import GroupFamily


@dataclass(frozen=True, kw_only=True)
class Modelled:
    """The modelled part of a run: its kernels and links, and how much they vary."""

    profile: VariabilityProfile
    compositions: tuple[Composition, ...]
    """Kernels that the durations consist of, by class."""
    devices_per_node: int
    nodes_per_domain: int = 1
    """Number of nodes that NVLink connects."""
    links_of: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    """Ranks whose links all groups of a family are assumed to use (``[K, 1]``), by family. Groups
    of other families use those of their own ranks."""

    def groups(self, family: GroupFamily) -> NDArray[np.int64]:
        """Return the global ranks whose links the groups of a family use."""
        places = self.links_of.get(family.index, family.ranks_KG)
        return np.broadcast_to(places, family.ranks_KG.shape)


@dataclass(frozen=True, kw_only=True)
class DrawnJob:
    """The draws of a job, and the run without variation that they continue from."""

    source: ProfileDraws
    base: Base
    fused: FusedGraph | None
    """Graph in which one member stands for a set of ranks. None: each stands for one rank."""

    def slowed(self, factor_R: NDArray[np.float64]) -> DrawnJob | None:
        """Return the same job with a further factor on the computation of each of its ranks.

        The factors are by rank of the whole job. None where ranks of one set have different
        factors.
        """
        own = factor_R if self.fused is None else factors_of_sets(self.fused, factor_R)
        if own is None:
            return None
        before = self.source.factor_R
        source = replace(self.source, factor_R=own if before is None else own * before)
        return replace(self, source=source, base=self.base.slowed(own))


def drawn_job(modelled: Modelled, base: Base, *, fused: bool = True) -> DrawnJob:
    """Return the draws of a null-device job.

    Args:
        base: the whole job without variation.
        fused: draw ranks that meet after every few kernels as one, where there are any.
    """
    sets = (
        lockstep_sets(base.graph, modelled.compositions, modelled.devices_per_node)
        if fused
        else None
    )
    factor_S = None if sets is None else factors_of_sets(sets, base.factor_R)
    if sets is None or factor_S is None:
        return _rank_by_rank(modelled, base)
    plain = QuotientDurations(fused=sets, origin=base.plain)
    pairs = zip(sets.origin.families, sets.graph.families, strict=True)
    classes = zip(sets.origin.classes, sets.classes, strict=True)
    source = ProfileDraws(
        graph=sets.graph,
        plain=plain,
        profile=modelled.profile,
        compositions=modelled.compositions,
        ranks_CKM=tuple(c.members_M[own.members_KF] for c, own in classes),
        groups_FKG=tuple(
            modelled.groups(family)[:, first_of_each(became_G)]
            for family, became_G in zip(sets.origin.families, sets.fused_group, strict=True)
        ),
        parallel_F=tuple(whole.n_groups // small.n_groups for whole, small in pairs),
        devices_per_node=modelled.devices_per_node,
        nodes_per_domain=modelled.nodes_per_domain,
        step_ns=base.step_ns,
        factor_R=factor_S,
    )
    small = replace(base, graph=sets.graph, plain=plain, factor_R=factor_S)
    return DrawnJob(source=source, base=small, fused=sets)


def _rank_by_rank(modelled: Modelled, base: Base) -> DrawnJob:
    graph = base.graph
    source = ProfileDraws(
        graph=graph,
        plain=base.plain,
        profile=modelled.profile,
        compositions=modelled.compositions,
        ranks_CKM=tuple(c.members_M[np.newaxis] for c in graph.classes),
        groups_FKG=tuple(modelled.groups(family) for family in graph.families),
        parallel_F=(1,) * len(graph.families),
        devices_per_node=modelled.devices_per_node,
        nodes_per_domain=modelled.nodes_per_domain,
        step_ns=base.step_ns,
        factor_R=base.factor_R,
    )
    return DrawnJob(source=source, base=base, fused=None)
