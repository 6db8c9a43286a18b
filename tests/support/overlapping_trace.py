"""A rank whose work hides one communication and leaves another exposed."""

from __future__ import annotations

from prismscale.graph.builder import TraceBuilder
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace

WORK_NS, HIDDEN_NS, EXPOSED_NS, IDLE_NS = 20_000_000, 10_000_000, 6_000_000, 4_000_000
STEP_NS = WORK_NS + EXPOSED_NS + IDLE_NS


def overlapping_trace(rank: int) -> RankTrace:
    """Work, beside it an all-reduce, then one that nothing hides, then the host."""
    world = GroupRecord(ranks=(0, 1), name="world", backend="nccl")
    builder = TraceBuilder(rank=rank, world_size=2, groups=[world])
    builder.begin_body()
    host = builder.add_compute(IDLE_NS, preds=[-1], label="forward, host")
    ends = [
        builder.add_compute(WORK_NS, preds=[host], lane="stream 0", label="forward"),
        builder.add_communication(
            CollectiveOp.ALL_REDUCE, 1 << 20, preds=[host], durations_ns=HIDDEN_NS, lane="nccl"
        ),
    ]
    builder.add_communication(
        CollectiveOp.ALL_REDUCE, 1 << 20, preds=ends, durations_ns=EXPOSED_NS, lane="nccl"
    )
    return builder.build()
