"""Small traces for tests of live ranks and capture planning."""

from __future__ import annotations

from collections.abc import Sequence

from prismscale.graph.builder import TraceBuilder
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace

Call = tuple[CollectiveOp, int, int]
"""Operation, bytes, group index."""


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
        for op, size, group_index in calls:
            last = builder.add_communication(
                op, size, group_index=group_index, preds=[last], durations_ns=50, site="train.py:7"
            )
            last = builder.add_compute(1_000, preds=[last], label="forward")
        return last

    last = write(prologue, last)
    builder.begin_body()
    write(body or [(CollectiveOp.ALL_REDUCE, n_bytes, 0)], last)
    return builder.build(known_groups=known)


def joined_traces(
    *computes_ns: list[int], tail_ns: list[int] | None = None
) -> dict[int, RankTrace]:
    """Ranks that compute as long as their samples say, meet for 5 ns, and close the step; the last
    rank after a tail."""
    world = GroupRecord(ranks=tuple(range(len(computes_ns))), name="world", backend="gloo")
    traces = {}
    for rank, samples_ns in enumerate(computes_ns):
        builder = TraceBuilder(rank=rank, world_size=len(computes_ns), groups=(world,))
        builder.begin_body()
        # After the last node of the step before.
        computed = builder.add_compute(samples_ns, preds=[len(builder) - 1])
        met = builder.add_communication(
            CollectiveOp.BARRIER,
            0,
            group_index=0,
            preds=[computed],
            durations_ns=[5] * len(samples_ns),
        )
        none_ns = [0] * len(samples_ns)
        closes_ns = tail_ns if tail_ns and rank == len(computes_ns) - 1 else none_ns
        builder.add_compute(closes_ns, preds=[met], label=f"of rank {rank}")
        traces[rank] = builder.build(known_groups=(world,))
    return traces


def small_trace() -> RankTrace:
    """Two prologue nodes; a body of a computation, an all-reduce and a computation."""
    groups = [GroupRecord(ranks=(0, 1, 2, 3), name="world"), GroupRecord(ranks=(1, 3))]
    builder = TraceBuilder(rank=1, world_size=4, groups=groups)
    builder.add_compute(5, label="init")
    builder.add_communication(CollectiveOp.BARRIER, 0, site="train.py:3")
    builder.begin_body()
    first = builder.add_compute([10, 11], label="forward", preds=[1])
    reduce = builder.add_communication(
        CollectiveOp.ALL_REDUCE, 4_096, group_index=1, preds=[first], lane="nccl", site="train.py:9"
    )
    builder.add_compute([20, 22], label="step", preds=[reduce, -1])
    return builder.build()
