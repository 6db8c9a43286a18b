"""Where a rank's step goes."""

from __future__ import annotations

from prismscale.analysis.attribution import break_down
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.facts import CaptureFacts
from prismscale.graph.trace import GroupRecord, RankTrace
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


def two_streams(*, modelled: bool) -> RankTrace:
    """The host issues work to two streams and waits for both."""
    world = GroupRecord(ranks=(0,), name="world", backend="nccl")
    builder = TraceBuilder(rank=0, world_size=1, groups=(world,))
    builder.begin_body()
    host = builder.add_compute(5, label="forward, host", preds=[len(builder) - 1])
    works = [
        builder.add_compute(ns, label="forward", preds=[host], lane=f"stream {k}")
        for k, ns in enumerate((100, 20))
    ]
    path = builder.add_compute(90, label="forward, host", preds=[host], lane="stream 0")
    builder.add_compute(1, label="forward, host", preds=[*works, path])
    return builder.build(known_groups=(world,), facts=CaptureFacts(modelled=modelled))


def test_kernels_of_streams_at_once_are_told_of_where_they_are_modelled() -> None:
    """The second stream's work lies within the first's; a launch path is no kernel."""
    for modelled, expected in ((True, 20), (False, 0)):
        graph = job_from_traces({0: two_streams(modelled=modelled)})
        timeline = simulate(graph, RecordedDurations(graph), steps=2, ranks=[0])
        assert break_down(timeline, 0).beside_ns == expected
