"""Draws of a whole job from a slice: one recorded pipeline replica stands in for all others.

Durations that belong together are drawn together. The computation of one microbatch on all stages
and in both directions comes from one recorded microbatch, because its length decides all of it.
Communications are drawn once for all ranks, by step.

Analysis of variance of the slice decides what a replica draws as one piece. If the microbatches of
a step resemble each other, a replica draws whole steps. Otherwise it draws single microbatches,
each from its own place in a step if the place matters, else from any place.

Array axes: ``D`` draws, ``P`` replicas, ``Q`` microbatches, ``T`` recorded steps, ``M`` members of
a class, ``G`` groups of a family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy
from numpy.typing import NDArray

from prismscale.durations.samples import NO_MICROBATCH, StepSamples
from prismscale.durations.source import Duration
from prismscale.errors import UsageError
from prismscale.graph.node import CollectiveOp, NodeKind

SIGNIFICANCE = 0.001
"""Probability of taking pure noise for resemblance."""

NodeKey = tuple[str, str, int]
"""Label of a node, label of the next node, microbatch: equal for equal work of all replicas."""


@dataclass(frozen=True, kw_only=True)
class StepIndices:
    """Recorded steps and microbatches from which each draw takes its durations."""

    step_DPQ: NDArray[np.int64]
    microbatch_DPQ: NDArray[np.int64]
    common_step_D: NDArray[np.int64]
    """Step that gives communications, and computation that belongs to no microbatch."""


def pick(samples: StepSamples, replica: int, *, draws: int, seed: int) -> StepIndices:
    """Draw recorded microbatches for every replica.

    Args:
        samples: recorded steps, of which only those of ``replica`` are used.
        replica: the recorded replica.
        draws: number of steps to draw.
        seed: seed of the random numbers.
    """
    total_TQ = microbatch_ns_TQ(samples, replica)
    n_steps, n_microbatches = total_TQ.shape
    n_replicas = len(np.unique(samples.replica_R))
    shape = (draws, n_replicas, n_microbatches)
    rng = np.random.default_rng(seed)
    step_DPQ = rng.integers(0, n_steps, shape)
    microbatch_DPQ = rng.integers(0, n_microbatches, shape)
    if _differ(total_TQ - total_TQ.mean(axis=0)):
        step_DPQ = np.broadcast_to(step_DPQ[..., :1], shape)
        microbatch_DPQ = np.broadcast_to(np.arange(n_microbatches), shape)
    elif _differ(total_TQ.T):
        microbatch_DPQ = np.broadcast_to(np.arange(n_microbatches), shape)
    return StepIndices(
        step_DPQ=step_DPQ,
        microbatch_DPQ=microbatch_DPQ,
        common_step_D=rng.integers(0, n_steps, draws),
    )


def _differ(rows: NDArray[np.int64] | NDArray[np.float64]) -> bool:
    """Whether rows differ in level by more than the scatter within them explains (F test)."""
    if min(rows.shape) < 2:
        return False
    within = rows.var(axis=1, ddof=1).mean()
    between = rows.mean(axis=1).var(ddof=1) * rows.shape[1]
    if within == 0:
        return bool(between > 0)
    freedom = (rows.shape[0] - 1, rows.size - rows.shape[0])
    return bool(scipy.stats.f.sf(between / within, *freedom) < SIGNIFICANCE)


def microbatch_ns_TQ(samples: StepSamples, replica: int) -> NDArray[np.int64]:
    """Return the computation of each recorded microbatch of a replica, summed over its stages.

    Raises:
        UsageError: the samples do not tell microbatches apart, or there is no such replica.
    """
    ranks = np.flatnonzero(samples.replica_R == replica)
    if len(ranks) == 0:
        raise UsageError(f"replica {replica} does not exist")
    n_microbatches = max(int(c.microbatch_B.max(initial=-1)) for c in samples.classes) + 1
    if n_microbatches == 0:
        raise UsageError("the recording does not tell microbatches apart; replicas need them")
    total_TQ = np.zeros((samples.n_steps, n_microbatches), dtype=np.int64)
    for rank in ranks.tolist():
        for key, ns_T in computations(samples, rank).items():
            if key[2] != NO_MICROBATCH:
                total_TQ[:, key[2]] += ns_T
    return total_TQ


def computations(samples: StepSamples, rank: int) -> dict[NodeKey, NDArray[np.int64]]:
    """Return the durations ``[T]`` of every computation of a rank."""
    index, member = int(samples.graph.class_of_R[rank]), int(samples.graph.member_of_R[rank])
    own = samples.classes[index]
    trace = samples.graph.classes[index].trace
    return {
        key: own.body_ns[node][:, min(own.column_M[member], own.body_ns[node].shape[1] - 1)]
        for node, key in enumerate(node_keys(samples, index))
        if trace.kind_N[trace.n_prologue + node] == NodeKind.COMPUTE
    }


def node_keys(samples: StepSamples, class_index: int) -> list[NodeKey]:
    """Return the key of every body node of a class."""
    trace = samples.graph.classes[class_index].trace
    body = slice(trace.n_prologue, None)
    labels = [trace.labels[i] for i in trace.label_N[body].tolist()]
    # Replicas differ in the barriers that they pass, so the next node is never a barrier.
    is_barrier = (trace.kind_N[body] == NodeKind.COLLECTIVE) & (
        trace.op_N[body] == CollectiveOp.BARRIER
    )
    after, following = [""] * len(labels), ""
    for node in reversed(range(len(labels))):
        after[node] = following
        if not is_barrier[node]:
            following = labels[node]
    return list(zip(labels, after, samples.classes[class_index].microbatch_B.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True)
class ReplicaDraws:
    """Durations of drawn steps of the whole job (a ``DurationSource`` with a draw axis)."""

    samples: StepSamples
    replica: int
    """The recorded replica."""
    picks: StepIndices
    slowdown_R: Mapping[int, float] = field(default_factory=dict)
    """Factor on the computation of slowed-down ranks, by rank."""

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """Return the durations of the prologue, which are the same in every draw."""
        return self.samples.classes[class_index].prologue_ns

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Return the durations of the body, which are the same in every simulated step."""
        rank_class = self.samples.graph.classes[class_index]
        recorded = computations(self.samples, self._recorded_rank(class_index))
        out: list[Duration] = []
        for node, key in enumerate(node_keys(self.samples, class_index)):
            kind = rank_class.trace.kind_N[rank_class.trace.n_prologue + node]
            if kind == NodeKind.COMPUTE:
                out.append(self._computation(class_index, key, recorded))
            else:
                out.append(self._communication(class_index, node))
        return out

    def _recorded_rank(self, class_index: int) -> int:
        stage_R, replica_R = self.samples.stage_R, self.samples.replica_R
        stage = stage_R[self.samples.graph.classes[class_index].members_M[0]]
        return int(np.flatnonzero((stage_R == stage) & (replica_R == self.replica))[0])

    def _computation(
        self, class_index: int, key: NodeKey, recorded: Mapping[NodeKey, NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        members = self.samples.graph.classes[class_index].members_M
        factor_M = np.array([self.slowdown_R.get(r, 1.0) for r in members.tolist()])
        if key not in recorded:
            raise UsageError(f"replica {self.replica} has no '{key[0]}' before '{key[1]}'")
        if key[2] == NO_MICROBATCH:
            drawn = recorded[key][self.picks.common_step_D][:, None]
        else:
            drawn = self._microbatch(class_index, key, recorded)
        if (factor_M == 1).all():
            return drawn
        return np.asarray(np.rint(drawn * factor_M), dtype=np.int64)

    def _microbatch(
        self, class_index: int, key: NodeKey, recorded: Mapping[NodeKey, NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        label, after, place = key
        n_microbatches = self.picks.step_DPQ.shape[2]
        # The first and the last microbatch have nodes that the others lack. These nodes keep their
        # own durations.
        ns_TQ = np.stack(
            [recorded.get((label, after, q), recorded[key]) for q in range(n_microbatches)], axis=1
        )
        _, replica_of_R = np.unique(self.samples.replica_R, return_inverse=True)
        column = replica_of_R[self.samples.graph.classes[class_index].members_M]
        step_DM = self.picks.step_DPQ[:, column, place]
        microbatch_DM = self.picks.microbatch_DPQ[:, column, place]
        return np.asarray(ns_TQ[step_DM, microbatch_DM], dtype=np.int64)

    def _communication(self, class_index: int, node: int) -> NDArray[np.int64]:
        """Return the time in the group with the recorded replica, or in the only group."""
        graph = self.samples.graph
        ns_TG = self.samples.classes[class_index].body_ns[node]
        column = 0
        if ns_TG.shape[1] > 1:
            rank_class = graph.classes[class_index]
            group_index = int(rank_class.trace.group_index_N[rank_class.trace.n_prologue + node])
            table = graph.families[rank_class.slots[group_index].family].ranks_KG
            holds = (self.samples.replica_R[table] == self.replica).any(axis=0)
            column = int(np.flatnonzero(holds)[0]) if holds.any() else 0
        return np.asarray(ns_TG[self.picks.common_step_D][:, [column]], dtype=np.int64)
