"""Where a rank's step goes."""

from __future__ import annotations

import pytest

from prismscale.analysis.attribution import break_down
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.facts import CaptureFacts
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord
from prismscale.sim.timeline import simulate
from support.jobs import RecordedDurations, job_from_traces
from support.traces import joined_traces


def test_a_communication_is_exposed_for_as_long_as_it_took() -> None:
    """As long as its duration says, whoever measured it; the rest is waiting for the last."""
    graph = job_from_traces(joined_traces([10], [30]))
    timeline = simulate(graph, RecordedDurations(graph), steps=2, ranks=[0, 1])

    early, late = break_down(timeline, 0), break_down(timeline, 1)

    assert (early.total_compute_ns, early.exposed_ns, early.skew_ns) == (10, {"world": 5}, 20)
    assert (late.total_compute_ns, late.exposed_ns, late.skew_ns) == (30, {"world": 5}, 0)
    assert early.step_ns == late.step_ns == 35


def test_waiting_for_the_host_counts_while_no_stream_works() -> None:
    """The first stream's launch path ends at 95; the second stream, recorded later, works from 5 to
    75."""
    world = GroupRecord(ranks=(0,), name="world", backend="nccl")
    builder = TraceBuilder(rank=0, world_size=1, groups=(world,))
    builder.begin_body()
    host = builder.add_compute(5, label="forward, host", preds=[len(builder) - 1])
    work = builder.add_compute(20, label="forward", preds=[host], lane="stream 0")
    path = builder.add_compute(90, label="forward, host", preds=[host], lane="stream 0")
    other = builder.add_compute(70, label="forward", preds=[host], lane="stream 1")
    builder.add_compute(1, label="forward, host", preds=[work, path, other])
    facts = CaptureFacts(modelled=True)
    graph = job_from_traces({0: builder.build(known_groups=(world,), facts=facts)})
    timeline = simulate(graph, RecordedDurations(graph), steps=2, ranks=[0])
    assert break_down(timeline, 0).compute_ns == {"forward, host": 5 + 20 + 1, "forward": 70}


@pytest.mark.parametrize(("name", "is_bubble"), [("mesh_pp", True), ("mesh_cp", False)])
def test_only_a_pipeline_has_bubbles(name: str, is_bubble: bool) -> None:
    """Attention that passes keys around waits for its peers, who are no stages."""
    pair = GroupRecord(ranks=(0, 1), name=name, backend="nccl")
    traces = {}
    for rank, work_ns in enumerate((10, 30)):
        builder = TraceBuilder(rank=rank, world_size=2, groups=(pair,))
        builder.begin_body()
        work = builder.add_compute(work_ns, preds=[len(builder) - 1])
        both = (CollectiveOp.SEND, CollectiveOp.RECV)
        ops = [builder.add_communication(op, 8, peer=1, preds=[work]) for op in both]
        builder.add_compute(1, preds=ops)
        traces[rank] = builder.build(known_groups=(pair,))
    graph = job_from_traces(traces)
    timeline = simulate(graph, RecordedDurations(graph), steps=2, ranks=[0])

    found = break_down(timeline, 0)

    assert (found.bubble_ns, found.skew_ns) == ((20, 0) if is_bubble else (0, 20))
