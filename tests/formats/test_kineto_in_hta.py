"""Kineto traces that we write, in HolisticTraceAnalysis itself, where it is installed
(``pip install HolisticTraceAnalysis``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from prismscale.formats.kineto.trace_writer import write_kineto
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace
from prismscale.sim.timeline import simulate_steady
from support.jobs import RecordedDurations, job_from_traces

hta = pytest.importorskip("hta.trace_analysis")
WORK_NS, HIDDEN_NS, EXPOSED_NS, IDLE_NS = 20_000_000, 10_000_000, 6_000_000, 4_000_000
STEP_NS = WORK_NS + EXPOSED_NS + IDLE_NS


def trace(rank: int) -> RankTrace:
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


def test_its_breakdown_and_overlap_are_ours(tmp_path: Path) -> None:
    """Computation, exposed communication, idle time, and how much is hidden, to 1 %."""
    graph = job_from_traces({0: trace(0)}, {0: 0, 1: 0})
    timeline = simulate_steady(graph, RecordedDurations(graph), ranks=[0, 1])[0]
    assert timeline.step_ns == STEP_NS
    write_kineto(graph, timeline, tmp_path)
    found = hta.TraceAnalysis(trace_dir=str(tmp_path))
    parts = found.get_temporal_breakdown(visualize=False)
    assert len(parts) == 2
    for column, ns in (("compute_time(us)", WORK_NS), ("non_compute_time(us)", EXPOSED_NS)):
        assert parts[column].tolist() == pytest.approx([ns / 1000] * 2, rel=0.01)
    overlap = found.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"]
    hidden = 100 * HIDDEN_NS / (HIDDEN_NS + EXPOSED_NS)
    assert overlap.tolist() == pytest.approx([hidden] * 2, rel=0.01)
