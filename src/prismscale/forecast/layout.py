"""The graph of a layout, by rule: TP × PP × DP, a pipeline schedule, durations per pass.

Ranks are laid out with the tensor-parallel axis fastest, then data, then pipeline (Megatron-LM's
default order). A pass of one microbatch through a stage is cut into slices, each followed by a
collective of the tensor-parallel group. A transfer is posted one action ahead, so that it overlaps
with computation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prismscale.cost.collective import CollectiveModel
from prismscale.cost.durations import GraphDurations
from prismscale.errors import UsageError
from prismscale.forecast.schedules import Action, Work, schedule
from prismscale.graph.assemble import assemble
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.groups import GroupTable
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace

AXES = ("tp", "dp", "pp")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCosts:
    """What one microbatch costs in one model chunk of a stage, and what a step costs besides."""

    forward_ns: int
    input_gradient_ns: int
    weight_gradient_ns: int
    optimizer_ns: int = 0
    first_stage_ns: int = 0
    """Further forward time of the first chunk of all (embedding)."""
    last_stage_ns: int = 0
    """Further forward time of the last chunk of all (output layer and loss)."""
    tp_collectives: int = 0
    """Collectives of the tensor-parallel group in a forward pass, and again in a backward one."""
    tp_bytes: int = 0
    boundary_bytes: int = 0
    """Activation that one rank passes to the next stage."""
    gradient_bytes: int = 0
    """Gradients of one rank, reduced over the data-parallel group."""


def build_layout(layout: Layout, costs: PassCosts) -> JobGraph:
    """The execution graph of every rank.

    Raises:
        UsageError: numbers that the schedule cannot use.
    """
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
    roles: list[list[int]] = [[] for _ in range(layout.world_size)]
    positions: list[list[int]] = [[] for _ in range(layout.world_size)]
    for index, (_, ranks) in enumerate(rows):
        for position, rank in enumerate(ranks):
            roles[rank].append(index)
            positions[rank].append(position)
    return GroupTable(
        ranks=tuple(ranks for _, ranks in rows),
        names=tuple(name for name, _ in rows),
        roles_R=tuple(tuple(r) for r in roles),
        positions_R=tuple(tuple(p) for p in positions),
    )


class _StageWriter:
    """Writes the trace of one pipeline stage."""

    def __init__(self, layout: Layout, costs: PassCosts, groups: GroupTable, stage: int) -> None:
        self._layout, self._costs, self._stage = layout, costs, stage
        rank = stage * layout.tp * layout.dp
        own = groups.of_rank(rank)
        self._role = {groups.names[g]: role for role, g in enumerate(own)}
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

    def _receive(self, action: Action, posted_after: int) -> list[int]:
        last_place = self._layout.pp * self._layout.chunks - 1
        if self._layout.pp == 1 or action.work is Work.WEIGHT:
            return []
        if action.work is Work.FORWARD:
            needed, direction, peer = self._place(action) > 0, "pp-forward", -1
        else:
            needed, direction, peer = self._place(action) < last_place, "pp-backward", 1
        return [self._transfer(CollectiveOp.RECV, direction, peer, posted_after)] if needed else []

    def _send(self, action: Action, done: int) -> None:
        last_place = self._layout.pp * self._layout.chunks - 1
        if self._layout.pp == 1:
            return
        if action.work is Work.FORWARD and self._place(action) < last_place:
            self._transfer(CollectiveOp.SEND, "pp-forward", 1, done)
        elif action.work is Work.BACKWARD and self._place(action) > 0:
            self._transfer(CollectiveOp.SEND, "pp-backward", -1, done)

    def _transfer(self, op: CollectiveOp, direction: str, peer: int, pred: int) -> int:
        return self._trace.add_communication(
            op,
            self._costs.boundary_bytes,
            role=self._role[direction],
            peer=peer,
            preds=[pred],
            label=f"{op.spelling} {direction[3:]}",
            lane=direction,
        )

    def _work(self, action: Action, preds: list[int]) -> int:
        duration_ns = self._duration_ns(action)
        slices = self._costs.tp_collectives if self._layout.tp > 1 else 0
        if action.work is Work.WEIGHT or slices == 0:
            return self._compute(duration_ns, preds, action.work.value)
        done = -1
        for i in range(slices):
            # Integer division by parts keeps the sum exact.
            part = duration_ns * (i + 1) // slices - duration_ns * i // slices
            computed = self._compute(part, preds if i == 0 else [done], action.work.value)
            done = self._trace.add_communication(
                CollectiveOp.ALL_REDUCE,
                self._costs.tp_bytes,
                role=self._role["tp"],
                preds=[computed],
                label="tp all_reduce",
                lane="compute",
            )
        return done

    def _compute(self, duration_ns: int, preds: list[int], label: str) -> int:
        return self._trace.add_compute(duration_ns, preds=preds, label=label, lane="compute")

    def _duration_ns(self, action: Action) -> int:
        costs = self._costs
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
        if self._layout.dp > 1:
            last = self._trace.add_communication(
                CollectiveOp.ALL_REDUCE,
                self._costs.gradient_bytes,
                role=self._role["dp"],
                preds=[last],
                label="gradient all_reduce",
            )
        if self._layout.world_size > 1:
            last = self._trace.add_communication(
                CollectiveOp.ALL_REDUCE,
                4,
                role=self._role["world"],
                preds=[last],
                label="gradient-norm all_reduce",
            )
        self._compute(self._costs.optimizer_ns, [last], "optimizer")
