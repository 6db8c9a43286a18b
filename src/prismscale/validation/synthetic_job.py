"""A synthetic job: tensor × pipeline × data parallel, 1F1B, with one duration per pass.

Ranks are laid out with the tensor-parallel axis fastest, then data, then pipeline (Megatron-LM's
default order). A pass of one microbatch through a stage is cut into slices, each followed by a
collective. A transfer is posted one pass ahead, so that it overlaps with computation. Gradients are
communicated once, at the end of the step. 1F1B is that of PipeDream-flush (Narayanan et al. 2021,
section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prismscale.cost.collective import CollectiveModel
from prismscale.durations.graph_durations import GraphDurations
from prismscale.errors import UsageError
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import GroupTable
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a job is distributed over its ranks."""

    tp: int
    pp: int
    dp: int
    microbatches: int

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "microbatches"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; at least 1 is needed")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        """Name of the layout in tables."""
        return f"TP{self.tp} PP{self.pp} DP{self.dp}"


class Move(NamedTuple):
    """One collective."""

    op: CollectiveOp
    n_bytes: int
    group: str = "tp"
    """``tp``, ``dp`` or ``world``. The collective is left out if this group has one rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCosts:
    """Costs of one microbatch in a stage, and further costs of a step."""

    forward_ns: int
    backward_ns: int
    weight_ns: int = 0
    """Further time of the backward pass: the gradient of the weights, for which no other stage
    waits. As in ZB-H1 (Qi et al. 2023, section 2.2), it runs as many microbatches later as there
    are stages before its own."""
    optimizer_ns: int = 0
    """Time of the optimizer in a stage, once per step."""
    last_stage_ns: int = 0
    """Further forward time of the last stage (output layer and loss); its backward takes twice."""
    forward_moves: tuple[Move, ...] = ()
    """Collectives within a forward pass, evenly spread."""
    backward_moves: tuple[Move, ...] = ()
    boundary_bytes: int = 0
    """Size of the activation that one rank passes to the next stage."""
    step_moves: tuple[Move, ...] = ()
    """Collectives once per step, after the last pass."""


class Pass(NamedTuple):
    """One microbatch through a stage."""

    microbatch: int
    is_forward: bool


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Pass]:
    """Return the passes of ``stage`` in order."""
    warm_up = min(stages - 1 - stage, microbatches)
    passes = [Pass(m, True) for m in range(warm_up)]
    for m in range(warm_up, microbatches):
        passes += [Pass(m, True), Pass(m - warm_up, False)]
    return passes + [Pass(m, False) for m in range(microbatches - warm_up, microbatches)]


def build_layout(layout: Layout, costs: PassCosts) -> JobGraph:
    """Build the execution graph of all ranks. Raises :class:`UsageError` for impossible numbers."""
    groups = _groups(layout)
    rank_RR = np.arange(layout.world_size)
    stage_width = layout.tp * layout.dp
    representative_R = rank_RR // stage_width * stage_width
    traces = {
        stage * stage_width: _StageWriter(layout, costs, groups, stage).write()
        for stage in range(layout.pp)
    }
    return assemble(traces, representative_R, groups, meta={"layout": layout.name})


def median_durations(graph: JobGraph, model: CollectiveModel) -> GraphDurations:
    """Return the durations of a layout's graph without variation."""
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

    def __init__(self, layout: Layout, costs: PassCosts, groups: GroupTable, stage: int) -> None:
        self._layout, self._costs, self._stage = layout, costs, stage
        rank = stage * layout.tp * layout.dp
        own = groups.of_rank(rank)
        self._group_index = {groups.names[g]: group_index for group_index, g in enumerate(own)}
        records = [GroupRecord(ranks=groups.ranks[g], name=groups.names[g]) for g in own]
        self._trace = TraceBuilder(rank=rank, world_size=layout.world_size, groups=records)

    def write(self) -> RankTrace:
        """Write all passes in the order of the schedule, then the end of the step."""
        # The step's first node, which links this step to the end of the step before.
        before = last = self._trace.add_compute(0, preds=[-1], label="step begins")
        for one in one_f_one_b(self._stage, self._layout.pp, self._layout.microbatches):
            received = self._receive(one, before)
            before, last = last, self._work(one, [last, *received])
            self._send(one, last)
            if self._costs.weight_ns and not one.is_forward and one.microbatch >= self._stage:
                before, last = last, self._weights(last)
        for _ in range(min(self._stage, self._layout.microbatches)):
            last = self._weights(last)
        self._end_step(last)
        return self._trace.build(known_groups=())

    def _weights(self, last: int) -> int:
        ns = self._costs.weight_ns
        return self._compute(ns, [last], "weight") if ns else last

    @property
    def _is_last(self) -> bool:
        return self._stage == self._layout.pp - 1

    def _receive(self, one: Pass, posted_after: int) -> list[int]:
        if one.is_forward and self._stage > 0:
            return [self._transfer(CollectiveOp.RECV, "pp-forward", -1, posted_after)]
        if not one.is_forward and not self._is_last:
            return [self._transfer(CollectiveOp.RECV, "pp-backward", 1, posted_after)]
        return []

    def _send(self, one: Pass, done: int) -> None:
        if one.is_forward and not self._is_last:
            self._transfer(CollectiveOp.SEND, "pp-forward", 1, done)
        elif not one.is_forward and self._stage > 0:
            self._transfer(CollectiveOp.SEND, "pp-backward", -1, done)

    def _transfer(self, op: CollectiveOp, direction: str, peer: int, pred: int) -> int:
        return self._trace.add_communication(
            op,
            self._costs.boundary_bytes,
            group_index=self._group_index[direction],
            peer=peer,
            preds=[pred],
            label=f"{op.spelling} {direction[3:]}",
            lane=direction,
        )

    def _work(self, one: Pass, preds: list[int]) -> int:
        label = "forward" if one.is_forward else "backward"
        moves = self._costs.forward_moves if one.is_forward else self._costs.backward_moves
        moves = tuple(m for m in moves if m.group in self._group_index)
        duration_ns = self._duration_ns(one)
        if not moves:
            return self._compute(duration_ns, preds, label)
        done = -1
        for i, move in enumerate(moves):
            # Cumulative integer division keeps the sum of the parts exact.
            part = duration_ns * (i + 1) // len(moves) - duration_ns * i // len(moves)
            computed = self._compute(part, preds if i == 0 else [done], label)
            done = self._collective(move, computed, lane="compute")
        return done

    def _duration_ns(self, one: Pass) -> int:
        more = self._costs.last_stage_ns if self._is_last else 0
        if one.is_forward:
            return self._costs.forward_ns + more
        return self._costs.backward_ns + 2 * more

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

    def _end_step(self, last: int) -> None:
        for move in self._costs.step_moves:
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
        self._compute(self._costs.optimizer_ns, [last], "optimizer")
