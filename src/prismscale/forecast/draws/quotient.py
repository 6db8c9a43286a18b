"""Ranks that cannot differ are drawn as one: a smaller job with exactly the same step times.

The members of a tensor-parallel group sit on one cluster node and run one program. Where nothing
distinguishes them (each graph node lasts as long on all of them, and so does each communication of
the groups that run in parallel through them), all their times are equal in every draw, and one of
them stands for all. Nothing is approximated: step times are those of the whole job, draw by draw.

Groups that run in parallel through one cluster node find the network in the same state, so one draw
serves all of them, in the whole job as in the smaller one.

Array axes: ``T`` recorded steps, ``M`` members of a class, ``F`` members of the smaller class,
``K`` ranks of a set, ``G`` groups of a family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.samples import ClassSamples, StepSamples
from prismscale.durations.source import Duration, DurationSource
from prismscale.errors import PrismscaleError
from prismscale.forecast.draws.lockstep import FusedGraph, fuse_sets, groups_within_classes
from prismscale.forecast.draws.montecarlo import Base
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.pipeline import message_groups


@dataclass(frozen=True, kw_only=True)
class Quotient:
    """The smaller job, with its samples and its run without variation."""

    fused: FusedGraph
    samples: StepSamples
    base: Base

    @property
    def graph(self) -> JobGraph:
        """Graph with one rank for each set."""
        return self.fused.graph


def quotient_of(samples: StepSamples, base: Base, devices_per_node: int) -> Quotient | None:
    """Return the smaller job, or None where no ranks can be drawn as one.

    The sets are the largest groups within one cluster node whose members cannot be told apart.
    """
    graph = samples.graph
    for group_index in group_indices_within_nodes(graph, devices_per_node):
        # Graph nodes are not fused: only ranks become fewer.
        whole = [tuple((b,) for b in range(c.trace.n_body)) for c in graph.classes]
        try:
            fused = fuse_sets(graph, group_index, whole)
            small = _samples(fused, samples)
        except PrismscaleError:
            # The sets do not fit the job's other groups.
            continue
        factor_S = factors_of_sets(fused, base.factor_R)
        if small is None or factor_S is None or not messages_stay(fused):
            continue
        plain = QuotientDurations(fused=fused, origin=base.plain)
        found = replace(base, graph=fused.graph, plain=plain, factor_R=factor_S)
        return Quotient(fused=fused, samples=small, base=found)
    return None


def group_indices_within_nodes(graph: JobGraph, devices_per_node: int) -> list[int]:
    """Return the group indices whose groups lie within a class and a cluster node.

    The largest groups come first.
    """
    sizes = {}
    for group_index in groups_within_classes(graph):
        tables = [graph.families[c.slots[group_index].family].ranks_KG for c in graph.classes]
        nodes = [table // devices_per_node for table in tables]
        if all((node == node[0]).all() for node in nodes):
            sizes[group_index] = tables[0].shape[0]
    return sorted(sizes, key=lambda group_index: -sizes[group_index])


def messages_stay(fused: FusedGraph) -> bool:
    """Return whether groups that carry messages keep their positions, which name the peers."""
    for rank_class in fused.origin.classes:
        for group_index in message_groups(rank_class.trace):
            family = rank_class.slots[group_index].family
            before, after = (g.families[family].group_size for g in (fused.origin, fused.graph))
            if before != after:
                return False
    return True


@dataclass(frozen=True, kw_only=True)
class QuotientDurations:
    """Durations of the smaller job: those of the first member of each set."""

    fused: FusedGraph
    origin: DurationSource

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """Return nothing: the smaller job has no prologue."""
        return ()

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Return the durations of the body in ``step``."""
        rank_class = self.fused.origin.classes[class_index]
        first_F = self.fused.classes[class_index].members_KF[0]
        computes = rank_class.trace.computes_B.tolist()
        group_indices = rank_class.trace.group_index_N[rank_class.trace.n_prologue :].tolist()
        out: list[Duration] = []
        for b, duration in enumerate(self.origin.body(class_index, step)):
            if np.ndim(duration) == 0 or np.shape(duration)[-1] == 1:
                out.append(duration)
            elif computes[b]:
                out.append(duration[..., first_F])
            else:
                family = rank_class.slots[group_indices[b]].family
                out.append(duration[..., first_of_each(self.fused.fused_group[family])])
        return out


def _samples(fused: FusedGraph, samples: StepSamples) -> StepSamples | None:
    """Return the samples of the smaller job, or None where members of a set differ."""
    classes = []
    stage_S, replica_S = (np.zeros(fused.graph.world_size, dtype=np.int64) for _ in range(2))
    for rank_class, small in zip(fused.origin.classes, fused.graph.classes, strict=True):
        own = _class(fused, samples.classes[rank_class.index], rank_class.index)
        if own is None:
            return None
        classes.append(own)
        first_R = rank_class.members_M[fused.classes[rank_class.index].members_KF[0]]
        stage_S[small.members_M] = samples.stage_R[first_R]
        replica_S[small.members_M] = samples.replica_R[first_R]
    return StepSamples(
        graph=fused.graph,
        step_ids=samples.step_ids,
        classes=tuple(classes),
        stage_R=stage_S,
        replica_R=replica_S,
    )


def _class(fused: FusedGraph, own: ClassSamples, class_index: int) -> ClassSamples | None:
    rank_class = fused.origin.classes[class_index]
    members_KF = fused.classes[class_index].members_KF
    computes = rank_class.trace.computes_B.tolist()
    group_indices = rank_class.trace.group_index_N[rank_class.trace.n_prologue :].tolist()
    body: list[NDArray[np.int64]] = []
    by_member = False
    for b, ns_TX in enumerate(own.body_ns):
        if ns_TX.shape[1] == 1:
            body.append(ns_TX)
            continue
        if computes[b]:
            ns_TKF = ns_TX[:, own.column_M][:, members_KF]
            kept, same = ns_TKF[:, 0], bool((ns_TKF == ns_TKF[:, :1]).all())
            by_member = True
        else:
            became_G = fused.fused_group[rank_class.slots[group_indices[b]].family]
            kept = ns_TX[:, first_of_each(became_G)]
            same = bool((kept[:, became_G] == ns_TX).all())
        if not same:
            return None
        body.append(kept)
    size = members_KF.shape[1]
    column_F = np.arange(size) if by_member else np.zeros(size, dtype=np.int64)
    return replace(own, body_ns=tuple(body), column_M=column_F)


def factors_of_sets(fused: FusedGraph, factor_R: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return the factor of each set, or None where its members differ."""
    factor_S = np.ones(fused.graph.world_size)
    for own, small, large in zip(
        fused.classes, fused.graph.classes, fused.origin.classes, strict=True
    ):
        factor_KF = factor_R[large.members_M[own.members_KF]]
        if (factor_KF != factor_KF[0]).any():
            return None
        factor_S[small.members_M] = factor_KF[0]
    return factor_S


def first_of_each(became_G: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each fused group, the first group that became it."""
    return np.unique(became_G, return_index=True)[1].astype(np.int64)
