"""Where a rank's step goes."""

from __future__ import annotations

from prismscale.analysis.attribution import break_down
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
