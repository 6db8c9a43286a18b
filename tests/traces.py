"""Small traces for tests of live ranks and capture planning."""

from __future__ import annotations

from collections.abc import Sequence

from prismscale.graph.builder import TraceBuilder
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace

Call = tuple[CollectiveOp, int, int]
"""Operation, bytes, role."""


def loop_trace(
    world_size: int,
    n_bytes: int,
    *,
    rank: int = 0,
    prologue: Sequence[Call] = (),
    body: Sequence[Call] | None = None,
    groups: Sequence[GroupRecord] | None = None,
) -> RankTrace:
    """Computation and communication in turn; by default one all-reduce of the world a step."""
    known = groups or [GroupRecord(ranks=tuple(range(world_size)), name="world", backend="nccl")]
    own = [g for g in known if rank in g.ranks]
    builder = TraceBuilder(rank=rank, world_size=world_size, groups=own)
    last = builder.add_compute(100, label="setup")

    def write(calls: Sequence[Call], last: int) -> int:
        for op, size, role in calls:
            last = builder.add_communication(
                op, size, role=role, preds=[last], durations_ns=50, site="train.py:7"
            )
            last = builder.add_compute(1_000, preds=[last], label="forward")
        return last

    last = write(prologue, last)
    builder.begin_body()
    write(body or [(CollectiveOp.ALL_REDUCE, n_bytes, 0)], last)
    return builder.build(known_groups=known)
