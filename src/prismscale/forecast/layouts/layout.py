"""The graph of a layout, by rule: TP × PP × DP, a pipeline schedule, durations per pass.

Ranks are laid out with the tensor-parallel axis fastest, then data, then pipeline (Megatron-LM's
default order). A pass of one microbatch through a stage is cut into slices, each followed by a
collective. A transfer is posted one action ahead, so that it overlaps with computation. What is
communicated once a step (gradients) comes at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prismscale.cost.collective import CollectiveModel
from prismscale.durations.graph_durations import GraphDurations
from prismscale.errors import UsageError
from prismscale.forecast.layouts.schedules import Action, Work, schedule
from prismscale.graph.assemble import assemble
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.groups import GroupTable
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a job is cut over its ranks."""

    tp: int
    pp: int
    dp: int
    microbatches: int
    schedule: str = "1f1b"
    chunks: int = 1
    """Model chunks a stage; more than 1 for ``interleaved``."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "microbatches", "chunks"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; at least 1 is needed")

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        """As shown in tables."""
        chunks = f"×{self.chunks}" if self.chunks > 1 else ""
        return f"TP{self.tp} PP{self.pp} DP{self.dp} {self.schedule}{chunks}"


class Move(NamedTuple):
    """One collective."""

    op: CollectiveOp
    n_bytes: int
    group: str = "tp"
    """``tp``, ``dp`` or ``world``; left out where that group has one rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCosts:
    """What one microbatch costs in one model chunk of a stage, and what a step costs besides."""

    forward_ns: int
    input_gradient_ns: int
    weight_gradient_ns: int
    optimizer_ns: int = 0
    """Of a stage, once a step; that of its first chunk counts."""
    first_stage_ns: int = 0
    """Further forward time of the first chunk of all (embedding)."""
    last_stage_ns: int = 0
    """Further forward time of the last chunk of all (output layer and loss)."""
    forward_moves: tuple[Move, ...] = ()
    """Collectives within a forward pass, evenly spread."""
    backward_moves: tuple[Move, ...] = ()
    boundary_bytes: int = 0
    """Activation that one rank passes to the next stage."""
    step_moves: tuple[Move, ...] = ()
    """Collectives once a step, after the last pass; those of a stage's first chunk count."""


def build_layout(layout: Layout, costs: PassCosts | Sequence[PassCosts]) -> JobGraph:
    """The execution graph of every rank.

    Args:
        costs: the same for all model chunks, or of each one, in the order of the forward pass.

    Raises:
        UsageError: numbers that the schedule cannot use.
    """
    chunks = layout.pp * layout.chunks
    by_chunk = [costs] * chunks if isinstance(costs, PassCosts) else list(costs)
    if len(by_chunk) != chunks:
        raise UsageError(f"costs of {len(by_chunk)} model chunks; {layout.name} has {chunks}")
    groups = _groups(layout)
    rank_RR = np.arange(layout.world_size)
    stage_width = layout.tp * layout.dp
    representative_R = rank_RR // stage_width * stage_width
    traces = {
        stage * stage_width: _StageWriter(layout, by_chunk, groups, stage).write()
        for stage in range(layout.pp)
    }
    return assemble(traces, representative_R, groups, meta={"layout": layout.name})


def median_durations(graph: JobGraph, model: CollectiveModel) -> GraphDurations:
    """Durations of a layout's graph without variation."""
    return GraphDurations(graph=graph, model=model)


def _groups(layout: Layout) -> GroupTable:
    grid = np.arange(layout.world_size).reshape(layout.pp, layout.dp, layout.tp)
    axis_of = {"tp": 2, "dp": 1, "pp-forward": 0, "pp-backward": 0}
    rows: list[tuple[str, tuple[int, ...]]] = [("world", tuple(range(layout.world_size)))]
    for name, axis in axis_of.items():
        size = grid.shape[axis]
        if size > 1:
            lines = np.moveaxis(grid, axis, -1).reshape(-1, size).tolist()
            rows += [(name, tuple(line)) for line in lines]
    group_indices: list[list[int]] = [[] for _ in range(layout.world_size)]
    positions: list[list[int]] = [[] for _ in range(layout.world_size)]
    for index, (_, ranks) in enumerate(rows):
        for position, rank in enumerate(ranks):
            group_indices[rank].append(index)
            positions[rank].append(position)
    return GroupTable(
        ranks=tuple(ranks for _, ranks in rows),
        names=tuple(name for name, _ in rows),
        groups_R=tuple(tuple(r) for r in group_indices),
        positions_R=tuple(tuple(p) for p in positions),
    )


class _StageWriter:
    """Writes the trace of one pipeline stage."""

    def __init__(
        self, layout: Layout, costs: Sequence[PassCosts], groups: GroupTable, stage: int
    ) -> None:
        self._layout, self._costs, self._stage = layout, costs, stage
        rank = stage * layout.tp * layout.dp
        own = groups.of_rank(rank)
        self._group_index = {groups.names[g]: group_index for group_index, g in enumerate(own)}
        records = [GroupRecord(ranks=groups.ranks[g], name=groups.names[g]) for g in own]
        self._trace = TraceBuilder(rank=rank, world_size=layout.world_size, groups=records)
        self._split = layout.schedule == "zero-bubble"

    def write(self) -> RankTrace:
        """All passes in the order of the schedule, then the end of the step."""
        actions = schedule(
            self._layout.schedule,
            stage=self._stage,
            stages=self._layout.pp,
            microbatches=self._layout.microbatches,
            chunks=self._layout.chunks,
        )
        # The step's first node: where this step hangs on to the end of the one before.
        before = last = self._trace.add_compute(0, preds=[-1], label="step begins")
        for action in actions:
            received = self._receive(action, before)
            before, last = last, self._work(action, [last, *received])
            self._send(action, last)
        self._end_step(last)
        return self._trace.build(known_groups=())

    def _place(self, action: Action) -> int:
        """Which of all chunks of the pipeline, in order of the forward pass."""
        return action.chunk * self._layout.pp + self._stage

    def _costs_of(self, action: Action) -> PassCosts:
        return self._costs[self._place(action)]

    def _receive(self, action: Action, posted_after: int) -> list[int]:
        last_place = self._layout.pp * self._layout.chunks - 1
        if self._layout.pp == 1 or action.work is Work.WEIGHT:
            return []
        if action.work is Work.FORWARD:
            needed, direction, peer = self._place(action) > 0, "pp-forward", -1
        else:
            needed, direction, peer = self._place(action) < last_place, "pp-backward", 1
        if not needed:
            return []
        # A message is as large as its sender's boundary, whoever names it.
        n_bytes = self._costs[self._place(action) + min(peer, 0)].boundary_bytes
        return [self._transfer(CollectiveOp.RECV, direction, peer, n_bytes, posted_after)]

    def _send(self, action: Action, done: int) -> None:
        last_place = self._layout.pp * self._layout.chunks - 1
        if self._layout.pp == 1:
            return
        if action.work is Work.FORWARD and self._place(action) < last_place:
            n_bytes = self._costs_of(action).boundary_bytes
            self._transfer(CollectiveOp.SEND, "pp-forward", 1, n_bytes, done)
        elif action.work is Work.BACKWARD and self._place(action) > 0:
            n_bytes = self._costs[self._place(action) - 1].boundary_bytes
            self._transfer(CollectiveOp.SEND, "pp-backward", -1, n_bytes, done)

    def _transfer(
        self, op: CollectiveOp, direction: str, peer: int, n_bytes: int, pred: int
    ) -> int:
        return self._trace.add_communication(
            op,
            n_bytes,
            group_index=self._group_index[direction],
            peer=peer,
            preds=[pred],
            label=f"{op.spelling} {direction[3:]}",
            lane=direction,
        )

    def _work(self, action: Action, preds: list[int]) -> int:
        duration_ns = self._duration_ns(action)
        moves = self._moves(action)
        if not moves:
            return self._compute(duration_ns, preds, action.work.value)
        done = -1
        for i, move in enumerate(moves):
            # Integer division by parts keeps the sum exact.
            part = duration_ns * (i + 1) // len(moves) - duration_ns * i // len(moves)
            computed = self._compute(part, preds if i == 0 else [done], action.work.value)
            done = self._collective(move, computed, lane="compute")
        return done

    def _moves(self, action: Action) -> tuple[Move, ...]:
        costs = self._costs_of(action)
        if action.work is Work.WEIGHT:
            return ()
        moves = costs.forward_moves if action.work is Work.FORWARD else costs.backward_moves
        return tuple(m for m in moves if m.group in self._group_index)

    def _collective(self, move: Move, pred: int, lane: str = "communication") -> int:
        return self._trace.add_communication(
            move.op,
            move.n_bytes,
            group_index=self._group_index[move.group],
            preds=[pred],
            label=f"{move.group} {move.op.spelling}",
            lane=lane,
        )

    def _compute(self, duration_ns: int, preds: list[int], label: str) -> int:
        return self._trace.add_compute(duration_ns, preds=preds, label=label, lane="compute")

    def _duration_ns(self, action: Action) -> int:
        costs = self._costs_of(action)
        if action.work is Work.WEIGHT:
            return costs.weight_gradient_ns
        extra = 0
        if self._place(action) == 0:
            extra += costs.first_stage_ns
        if self._place(action) == self._layout.pp * self._layout.chunks - 1:
            extra += costs.last_stage_ns
        if action.work is Work.FORWARD:
            return costs.forward_ns + extra
        whole = costs.input_gradient_ns + 2 * extra
        return whole if self._split else whole + costs.weight_gradient_ns

    def _end_step(self, last: int) -> None:
        costs = self._costs[self._stage]
        for move in costs.step_moves:
            if move.group in self._group_index:
                last = self._collective(move, last)
        if self._layout.world_size > 1:
            last = self._trace.add_communication(
                CollectiveOp.ALL_REDUCE,
                4,
                group_index=self._group_index["world"],
                preds=[last],
                label="gradient-norm all_reduce",
            )
        self._compute(costs.optimizer_ns, [last], "optimizer")
