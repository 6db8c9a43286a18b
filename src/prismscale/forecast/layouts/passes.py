"""What each pipeline stage of a recording spends on a microbatch, read off its nodes.

Phases are told by labels (``forward``, ``backward``); microbatches are counted by what the first
stage sends on. A collective that occurs at least once a microbatch belongs to the passes, a rarer
one to the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.samples import StepSamples
from prismscale.errors import UsageError
from prismscale.forecast.layouts.layout import Move
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import HOST, GroupRecord, RankTrace

PHASES = ("forward", "backward")
STEP = "step"
"""Phase of what is done once a step."""
AXIS_NAMES = {"tp": ("tp", "tensor"), "dp": ("dp", "data", "shard", "replicate", "fsdp")}


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How the recorded job is cut."""

    tp: int
    pp: int
    dp: int
    microbatches: int
    chunks: int


@dataclass(frozen=True, kw_only=True)
class StagePasses:
    """One stage, on its first rank."""

    phase_ns: Mapping[str, float]
    """Computation: ``forward`` and ``backward`` of one microbatch, the rest once a step."""
    pass_cv: float
    """Coefficient of variation of a span of computation, as if passes were drawn independently."""
    moves: Mapping[str, tuple[Move, ...]]
    """Collectives of one pass, or of the step."""
    boundary_bytes: int
    """What it passes on for one microbatch; 0 for the last stage."""
    in_flight: int
    """Most microbatches whose activations it holds."""
    peak_bytes: int | None


def read_passes(samples: StepSamples) -> tuple[Degrees, list[StagePasses]]:
    """The degrees of a recording, and its stages in order.

    Raises:
        UsageError: no pipeline, no labelled passes, or microbatches that cannot be counted.
    """
    stages = int(samples.stage_R.max()) + 1
    if stages < 2:
        raise UsageError(
            "the run has no pipeline, so what its stages would pass on is not known: explore a run "
            "with pipeline stages, or a job file"
        )
    firsts = [int(np.flatnonzero(samples.stage_R == s)[0]) for s in range(stages)]
    microbatches, chunks = _count_microbatches(_Stage(samples, firsts[0]), stages)
    shown = [_Stage(samples, rank) for rank in firsts]
    tp = max(_group_size(s, "tp") for s in shown)
    if samples.graph.world_size % (tp * stages):
        raise UsageError(f"{samples.graph.world_size} ranks are no {tp} × {stages} × replicas")
    degrees = Degrees(
        tp=tp,
        pp=stages,
        dp=samples.graph.world_size // (tp * stages),
        microbatches=microbatches,
        chunks=chunks,
    )
    return degrees, [_passes(s, degrees) for s in shown]


LAUNCHES = ", host"
"""End of a label on the null device: the launch path of a span, beside its work on the stream."""


class _Stage:
    """Nodes of a stage's first rank, with their durations."""

    def __init__(self, samples: StepSamples, rank: int) -> None:
        index = int(samples.graph.class_of_R[rank])
        own = samples.classes[index]
        self.trace: RankTrace = samples.graph.classes[index].trace
        self.rank = rank
        self.column = int(own.column_M[int(samples.graph.member_of_R[rank])])
        self.body_ns = own.body_ns
        p2p = [r for _, kind, r in self.nodes() if kind in (NodeKind.SEND, NodeKind.RECV)]
        self.pipeline = {self.trace.groups[r].ranks for r in p2p}

    def beyond_its_work_ns(self, node: int) -> NDArray[np.int64]:
        """What a computation adds to its stage, by recorded step. A span of a device is its work
        and, on the same lane after it, its launch path: only what exceeds the work counts. The
        host's own lane runs ahead of the device."""
        own_T = self._column_ns(node)
        trace = self.trace
        if not self.label(node).endswith(LAUNCHES):
            return own_T
        i = trace.n_prologue + node
        if trace.lanes[int(trace.lane_N[i])] == HOST:
            return np.zeros_like(own_T)
        is_beside_work = node > 0 and trace.lane_N[i - 1] == trace.lane_N[i]
        return np.maximum(own_T - self._column_ns(node - 1), 0) if is_beside_work else own_T

    def _column_ns(self, node: int) -> NDArray[np.int64]:
        ns_TX = self.body_ns[node]
        return ns_TX[:, self.column if ns_TX.shape[1] > 1 else 0]

    def nodes(self) -> Iterator[tuple[int, NodeKind, int]]:
        """Body node, kind and group index of each."""
        first = self.trace.n_prologue
        for i in range(first, self.trace.n_nodes):
            yield i - first, NodeKind(int(self.trace.kind_N[i])), int(self.trace.group_index_N[i])

    def label(self, node: int) -> str:
        return self.trace.labels[int(self.trace.label_N[self.trace.n_prologue + node])]

    def toward_last(self, node: int) -> bool:
        """Whether a send or receive has the next stage as its peer."""
        return int(self.trace.peer_N[self.trace.n_prologue + node]) == 1

    def n_bytes(self, node: int) -> int:
        return int(self.trace.bytes_N[self.trace.n_prologue + node])

    def op(self, node: int) -> CollectiveOp:
        return CollectiveOp(int(self.trace.op_N[self.trace.n_prologue + node]))

    def axis(self, group_index: int) -> str:
        """``tp``, ``dp`` or ``world``: which axis of a layout stands for a group."""
        group = self.trace.groups[group_index]
        if len(group.ranks) == self.trace.world_size or group.ranks in self.pipeline:
            return "world"
        return _axis_by_name(group) or "dp"


def _axis_by_name(group: GroupRecord) -> str:
    name = group.name.lower()
    return next((axis for axis, parts in AXIS_NAMES.items() if any(p in name for p in parts)), "")


def _group_size(stage: _Stage, axis: str) -> int:
    sizes = [
        len(stage.trace.groups[group_index].ranks)
        for _, kind, group_index in stage.nodes()
        if kind == NodeKind.COLLECTIVE and stage.axis(group_index) == axis
    ]
    return max(sizes, default=1)


def _count_microbatches(first: _Stage, stages: int) -> tuple[int, int]:
    """Microbatches and model chunks a stage. An interleaved first stage also sends gradients back,
    to the last one: once a microbatch for every chunk but its first."""
    sends = [node for node, kind, _ in first.nodes() if kind == NodeKind.SEND]
    on = sum(first.toward_last(node) for node in sends)
    back = len(sends) - on
    microbatches = on - back
    if microbatches < 1 or on % microbatches:
        raise UsageError(
            f"cannot count microbatches: rank {first.rank} sends {on} times to the next of "
            f"{stages} stages and {back} times back; explore a job file instead"
        )
    return microbatches, on // microbatches


def _passes(stage: _Stage, degrees: Degrees) -> StagePasses:
    m = degrees.microbatches
    total_ns = dict.fromkeys((*PHASES, STEP), 0.0)
    variance = dict.fromkeys((*PHASES, STEP), 0.0)
    counts: Counter[tuple[str, Move]] = Counter()
    sent = 0
    phase = STEP
    for node, kind, group_index in stage.nodes():
        if kind == NodeKind.COMPUTE:
            phase = next((p for p in PHASES if p in stage.label(node)), STEP)
            ns_T = stage.beyond_its_work_ns(node)
            total_ns[phase] += float(np.median(ns_T))
            variance[phase] += float(ns_T.var())
        elif kind == NodeKind.COLLECTIVE:
            if len(stage.trace.groups[group_index].ranks) > 1:
                move = Move(stage.op(node), stage.n_bytes(node), stage.axis(group_index))
                counts[phase, move] += 1
        elif kind == NodeKind.SEND and stage.toward_last(node):
            sent += stage.n_bytes(node)
    if not all(total_ns[p] for p in PHASES):
        raise UsageError(
            f"rank {stage.rank} has no computation that is called forward and backward; "
            "explore a job file instead"
        )
    mean = sum(total_ns[p] for p in PHASES) / (2 * m)
    return StagePasses(
        phase_ns={p: total_ns[p] / (m if p in PHASES else 1) for p in (*PHASES, STEP)},
        pass_cv=float(np.sqrt(sum(variance[p] for p in PHASES) / (2 * m)) / mean),
        moves=_moves(counts, m),
        boundary_bytes=round(sent / m / degrees.chunks),
        in_flight=_in_flight(stage),
        peak_bytes=stage.trace.memory.peak_bytes if stage.trace.memory else None,
    )


def _moves(
    counts: Mapping[tuple[str, Move], int], microbatches: int
) -> dict[str, tuple[Move, ...]]:
    found: dict[str, list[Move]] = {p: [] for p in (*PHASES, STEP)}
    for (phase, move), count in counts.items():
        if phase in PHASES and count >= microbatches > 1:
            found[phase] += [move] * round(count / microbatches)
        else:
            found[STEP] += [move] * count
    return {phase: tuple(moves) for phase, moves in found.items()}


def _in_flight(stage: _Stage) -> int:
    """Most microbatches that were sent on and have not come back; at least the one in work."""
    held = most = 0
    for node, kind, _ in stage.nodes():
        if kind in (NodeKind.SEND, NodeKind.RECV) and stage.toward_last(node):
            held += 1 if kind == NodeKind.SEND else -1
            most = max(most, held)
    return max(most, 1)
