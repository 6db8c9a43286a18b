"""Derives each stage's program and the members of each communication from all recorded steps.

A worker runs *units* one after another. A unit is a computation, a communication, or a batch of
isend and irecv that start and end together. A *traced collective* joins the units of all
participants of one communication. :mod:`prismscale.formats.straggler.separate` separates waiting
inside a recorded communication from the communication itself.

Array axes: ``T`` steps, ``D`` data-parallel ranks, ``K`` operations of one stage, ``U`` its units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import FormatError
from prismscale.formats.straggler.table import OpKey, OpTable, StageTable
from prismscale.graph.node import CollectiveOp

BATCH_TOLERANCE_NS = 5_000
"""Operations of a batch have the same start and end up to this. Single-precision seconds are about
this coarse after 64 s."""

ACROSS_REPLICAS = {
    "params-all-gather": CollectiveOp.ALL_GATHER,
    "grads-reduce-scatter": CollectiveOp.REDUCE_SCATTER,
    "separate-grads-all-reduce": CollectiveOp.ALL_REDUCE,
}
"""Collectives of the data-parallel group of a stage."""
EMBEDDING = "embedding-grads-all-reduce"
"""All-reduce between first and last stage of each replica."""
EVERYBODY = "optimizer-clip-main-grad"
"""All-reduce of the gradient norm, over all workers."""
COMPUTATIONS = frozenset(
    {
        "forward-compute",
        "backward-compute",
        "optimizer",
        "gc",
        # Runs among the tensor or sequence parallel ranks inside one worker, so the trace shows no
        # worker that waits for it.
        "layernorm-grads-all-reduce",
    }
)
SENDS = {"forward-send": 1, "backward-send": -1}
RECEIVES = {"forward-recv": -1, "backward-recv": 1}
"""Stage of the peer, relative to ours."""


class Group(Enum):
    """Kinds of process group, in the order in which they are created."""

    WORLD = "world"
    PIPELINE = "pp"
    """All stages of one replica."""
    DATA = "dp"
    """All replicas of one stage."""
    EMBEDDING = "embedding"
    """First and last stage of one replica."""

    @property
    def across_replicas(self) -> bool:
        """True where one group holds all replicas; else each replica has its own."""
        return self in (Group.WORLD, Group.DATA)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageUnits:
    """The units of one stage in program order."""

    stage: int
    keys: tuple[OpKey, ...]
    microbatch_K: NDArray[np.int32]
    units: tuple[tuple[int, ...], ...]
    """The operations of each unit, as indices into :attr:`keys`."""
    start_ns_TDU: NDArray[np.int64]
    end_ns_TDU: NDArray[np.int64]

    def unit_of(self, key: int) -> int:
        """Return the unit that contains an operation."""
        return next(u for u, members in enumerate(self.units) if key in members)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedCollective:
    """One communication of a step."""

    op: CollectiveOp
    """SEND for a point-to-point transfer."""
    members: tuple[tuple[int, int], ...]
    """(stage, operation index) of each stage that takes part; the sender first."""
    group: Group


def stage_units(table: StageTable) -> StageUnits:
    """Order the operations of a stage and find its batches."""
    start, end = table.start_ns_TDK, table.end_ns_TDK
    order = _program_order(start, end)
    units: list[tuple[int, ...]] = []
    for key in order:
        if units and _is_batch(table, units[-1][-1], key):
            units[-1] = (*units[-1], key)
        else:
            units.append((key,))
    return StageUnits(
        stage=table.stage,
        keys=table.keys,
        microbatch_K=table.microbatch_K,
        units=tuple(units),
        start_ns_TDU=np.stack([start[..., list(u)].min(axis=-1) for u in units], axis=-1),
        end_ns_TDU=np.stack([end[..., list(u)].max(axis=-1) for u in units], axis=-1),
    )


def _program_order(start: NDArray[np.int64], end: NDArray[np.int64]) -> list[int]:
    # Order by mean place, not by mean time: steps and replicas differ in speed, not in program.
    by_end = np.argsort(end, axis=-1, kind="stable")
    by_both = np.argsort(np.take_along_axis(start, by_end, axis=-1), axis=-1, kind="stable")
    ordered = np.take_along_axis(by_end, by_both, axis=-1)
    place = np.argsort(ordered, axis=-1).mean(axis=(0, 1))
    return [int(k) for k in np.argsort(place, kind="stable")]


def _is_batch(table: StageTable, a: int, b: int) -> bool:
    labels = {table.keys[a].label, table.keys[b].label}
    if not labels <= SENDS.keys() | RECEIVES.keys():
        return False
    together = [
        np.abs(times[..., a] - times[..., b]) <= BATCH_TOLERANCE_NS
        for times in (table.start_ns_TDK, table.end_ns_TDK)
    ]
    return bool((together[0] & together[1]).mean() > 0.5)


def collectives(table: OpTable) -> list[TracedCollective]:
    """Return every communication of a step.

    Raises:
        FormatError: an operation has an unknown type, or a message lacks its other end.
    """
    found: list[TracedCollective] = []
    for stage in table.stages:
        for index, key in enumerate(stage.keys):
            found += _collectives_of(table, stage.stage, index, key)
    met = {member for m in found for member in m.members}
    for stage in table.stages:
        for index, key in enumerate(stage.keys):
            if key.label in RECEIVES and (stage.stage, index) not in met:
                raise FormatError(
                    f"stage {stage.stage}: {key.label} {key.sequence} has no matching send"
                )
    return found


def _collectives_of(
    table: OpTable, stage: int, index: int, key: OpKey
) -> Iterator[TracedCollective]:
    own = (stage, index)
    if key.label in SENDS:
        peer = (stage + SENDS[key.label]) % table.n_stages
        receive = OpKey(label=key.label.replace("send", "recv"), sequence=key.sequence)
        yield TracedCollective(
            op=CollectiveOp.SEND,
            members=(own, _find(table, peer, receive, stage, key)),
            group=Group.PIPELINE,
        )
    elif key.label in ACROSS_REPLICAS:
        yield TracedCollective(op=ACROSS_REPLICAS[key.label], members=(own,), group=Group.DATA)
    elif key.label in (EMBEDDING, EVERYBODY):
        sharing = [s.stage for s in table.stages if key in s.keys]
        if stage == sharing[0]:
            yield TracedCollective(
                op=CollectiveOp.ALL_REDUCE,
                members=tuple((s, table.stages[s].keys.index(key)) for s in sharing),
                group=Group.WORLD if key.label == EVERYBODY else Group.EMBEDDING,
            )
    elif key.label not in COMPUTATIONS and key.label not in RECEIVES:
        known = sorted({*COMPUTATIONS, *SENDS, *RECEIVES, *ACROSS_REPLICAS, EMBEDDING, EVERYBODY})
        raise FormatError(
            f"operation type '{key.label}' is unknown, so nobody can say who waits for whom; "
            f"known are {', '.join(known)}"
        )


def _find(table: OpTable, peer: int, key: OpKey, stage: int, send: OpKey) -> tuple[int, int]:
    if key not in table.stages[peer].keys:
        raise FormatError(
            f"stage {stage}: {send.label} {send.sequence} has no matching {key.label} on "
            f"stage {peer}"
        )
    return peer, table.stages[peer].keys.index(key)
