"""Builds the program of a worker: the nodes of its trace, and where their durations come from.

Before each unit stands a computation called ``gap``: time that no recorded operation covers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from prismscale.formats.straggler.barriers import Barrier, HiddenBarriers
from prismscale.formats.straggler.separate import Separated
from prismscale.formats.straggler.structure import (
    RECEIVES,
    SENDS,
    Group,
    StageUnits,
    TracedCollective,
)
from prismscale.graph.node import CollectiveOp

GAP = "gap"
BARRIER_LABEL = "unrecorded barrier"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramStep:
    """One node of a worker's program."""

    label: str
    preds: tuple[int, ...]
    microbatch: int = -1
    gap_before: int = -1
    """The unit that follows this gap; -1 if the node is no gap. The number of units stands for the
    end of the step."""
    unit: int = -1
    """The unit that a computation node stands for; -1 for other nodes."""
    collective: int = -1
    """Index of the traced collective that a node belongs to; -1 for other nodes."""
    barrier: int = -1
    """Index of the hidden barrier that a node belongs to; -1 for other nodes."""
    op: CollectiveOp = CollectiveOp.BARRIER
    group: Group = Group.WORLD
    peer: int = -1
    """Stage of the peer of a send or receive, relative to ours."""

    @property
    def is_compute(self) -> bool:
        """Whether the node is a computation or a gap."""
        return self.collective < 0 and self.barrier < 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerJob:
    """A straggler trace, split into its structure and its times without waiting."""

    n_replicas: int
    stages: tuple[StageUnits, ...]
    collectives: tuple[TracedCollective, ...]
    parts: Separated
    hidden: HiddenBarriers

    def barriers_of(self, stage: int, replica: int) -> tuple[int, ...]:
        """Return the indices of the barriers that a worker takes part in."""
        return tuple(i for i, b in enumerate(self.hidden.barriers) if (stage, replica) in b.workers)

    def compute_ns_TD(self, stage: int, step: ProgramStep) -> NDArray[np.int64]:
        """Return the durations of a computation or gap of a stage, for every replica."""
        begin, left = self.parts.begin_ns_TDU[stage], self.hidden.left_ns_TDU[stage]
        closed = self.parts.closed_ns_TDU[stage]
        if step.unit >= 0:
            return np.asarray(closed[..., step.unit] - begin[..., step.unit])
        u = step.gap_before
        until = closed[..., -1] if u == begin.shape[-1] else begin[..., u]
        before = left[..., u - 1] if u else np.zeros_like(until)
        return np.asarray(np.maximum(until - before, 0))

    def communication_ns(self, step: ProgramStep, replicas: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the durations ``[T, G]`` of a communication in the groups of these replicas."""
        if step.barrier >= 0:
            return self.hidden.barriers[step.barrier].own_ns_T[:, None]
        own = self.parts.own_ns[step.collective]
        return own if own.shape[1] == 1 else own[:, replicas]


def worker_program(job: StragglerJob, stage: int, replica: int) -> list[ProgramStep]:
    """Return the program of one worker."""
    units = job.stages[stage]
    places = _collectives_by_key(job.collectives, stage)
    barriers = [(i, job.hidden.barriers[i]) for i in job.barriers_of(stage, replica)]
    steps: list[ProgramStep] = []
    # A worker begins a step after it has ended the one before: -1 is the last node of that step.
    tails: tuple[int, ...] = (-1,)
    for u, members in enumerate(units.units):
        for step in _barriers_before(barriers, stage, replica, u):
            tails = _append(steps, [step], tails)
        tails = _append(steps, [_gap(units, u, members[0])], tails)
        tails = _append(
            steps, [_node(units, u, k, places, job.collectives) for k in members], tails
        )
    if not steps[-1].is_compute:
        _append(steps, [ProgramStep(label=GAP, preds=(), gap_before=len(units.units))], tails)
    return steps


def _append(
    steps: list[ProgramStep], new: Sequence[ProgramStep], preds: tuple[int, ...]
) -> tuple[int, ...]:
    """Append nodes that run side by side after ``preds``, and return their positions."""
    first = len(steps)
    for step in new:
        steps.append(replace(step, preds=preds))
    return tuple(range(first, len(steps)))


def _collectives_by_key(meets: Sequence[TracedCollective], stage: int) -> dict[int, int]:
    return {k: i for i, m in enumerate(meets) for s, k in m.members if s == stage}


def _barriers_before(
    barriers: Sequence[tuple[int, Barrier]], stage: int, replica: int, unit: int
) -> Iterator[ProgramStep]:
    for index, barrier in barriers:
        if (stage, replica, unit) in barrier.members:
            yield ProgramStep(label=BARRIER_LABEL, preds=(), barrier=index, group=barrier.group)


def _gap(units: StageUnits, unit: int, key: int) -> ProgramStep:
    return ProgramStep(label=GAP, preds=(), gap_before=unit, microbatch=_microbatch(units, key))


def _node(
    units: StageUnits,
    unit: int,
    key: int,
    places: dict[int, int],
    meets: Sequence[TracedCollective],
) -> ProgramStep:
    label, microbatch = units.keys[key].label, _microbatch(units, key)
    if key not in places:
        return ProgramStep(label=label, preds=(), unit=unit, microbatch=microbatch)
    collective = meets[places[key]]
    p2p = {**dict.fromkeys(SENDS, CollectiveOp.SEND), **dict.fromkeys(RECEIVES, CollectiveOp.RECV)}
    return ProgramStep(
        label=label,
        preds=(),
        collective=places[key],
        op=p2p.get(label, collective.op),
        group=collective.group,
        peer=(SENDS | RECEIVES).get(label, -1),
        microbatch=microbatch,
    )


def _microbatch(units: StageUnits, key: int) -> int:
    """Return the microbatch of an operation.

    A message belongs to that of the computation with the same direction and sequence number.
    """
    own = int(units.microbatch_K[key])
    label = units.keys[key].label
    if own >= 0 or not (label in SENDS or label in RECEIVES):
        return own
    direction = label.split("-")[0]
    for k, other in enumerate(units.keys):
        if (other.label, other.sequence) == (f"{direction}-compute", units.keys[key].sequence):
            return int(units.microbatch_K[k])
    return own
