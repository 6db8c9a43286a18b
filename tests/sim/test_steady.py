"""A job has settled when its later steps are known: the engine is asked for many more of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.graph.builder import TraceBuilder
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.trace import GroupRecord, RankTrace
from prismscale.sim.steady import LONGEST_CYCLE, MOST_STEPS
from prismscale.sim.timeline import simulate, simulate_steady
from support.jobs import RecordedDurations, job_from_traces
from support.strategies import durations, jobs


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_the_settled_step_is_that_of_the_long_run(data: st.DataObject) -> None:
    """Over many later cycles the job's end grows by exactly as much as was said."""
    job = data.draw(jobs())
    table = data.draw(durations(job.graph, steps=1))
    _, steady = simulate_steady(job.graph, table)

    if steady.settled:
        cycles = 5
        later = simulate(job.graph, table, steps=steady.steps + cycles * steady.cycle)
        ends_T = later.step_end_ns_TDR[:, 0].max(axis=-1)
        assert ends_T[-1] - ends_T[steady.steps - 1] == cycles * steady.cycle_ns


def test_a_host_that_issues_ahead_does_not_set_the_step() -> None:
    """Host work of 10 beside device work of 100: the step is the device's."""
    graph = two_lane_job(host_ns=10, device_ns=100)
    timeline, steady = simulate_steady(graph, RecordedDurations(graph))
    assert (steady.step_ns, steady.settled, timeline.step_ns) == (100, True, 100)


def test_a_host_that_is_slower_than_its_device_sets_the_step() -> None:
    """The other way round, the step is the host's."""
    graph = two_lane_job(host_ns=100, device_ns=10)
    assert simulate_steady(graph, RecordedDurations(graph))[1].step_ns == 100


def test_ranks_of_unequal_pace_that_never_meet_are_as_slow_as_the_slowest() -> None:
    """Nothing holds the quicker one back, and it does not count."""
    graph = job_from_traces({0: lone_trace(0, 30), 1: lone_trace(1, 50)})
    _, steady = simulate_steady(graph, RecordedDurations(graph))
    assert (steady.step_ns, steady.settled) == (50, True)


def test_a_part_with_a_rhythm_of_its_own_does_not_keep_the_job_from_settling() -> None:
    """A rank whose work follows what it did 11 steps ago, beside one that is always slower."""
    graph = job_from_traces({0: lone_trace(0, 30, reach=11), 1: lone_trace(1, 50)})
    _, steady = simulate_steady(graph, RecordedDurations(graph))
    assert (steady.step_ns, steady.settled) == (50, True)


def test_a_job_that_does_not_settle_is_shown_as_it_is() -> None:
    """A longer rhythm than is looked for: the mean of the later half."""
    graph = job_from_traces({0: lone_trace(0, 1100, reach=11), 1: lone_trace(1, 50)})
    _, steady = simulate_steady(graph, RecordedDurations(graph))
    assert not steady.settled
    assert abs(steady.step_ns - 100) < 15


def test_only_steps_of_the_settled_job_are_kept() -> None:
    """Node times begin where the job has settled."""
    graph = two_lane_job(host_ns=10, device_ns=100)
    timeline, steady = simulate_steady(graph, RecordedDurations(graph), ranks=[0])
    assert timeline.ranks[0].first_position == steady.steps * graph.classes[0].trace.n_body
    assert len(timeline.step_end_ns_TDR) > steady.steps


def test_limits_leave_room_for_a_cycle() -> None:
    """The longest cycle fits into the steps that are simulated at most."""
    assert MOST_STEPS > 2 * LONGEST_CYCLE


def lone_trace(rank: int, ns: int, reach: int = 1) -> RankTrace:
    """A rank that computes and meets nobody; its work follows that of ``reach`` steps ago."""
    builder = TraceBuilder(rank=rank, world_size=2, groups=[GroupRecord(ranks=(0, 1))])
    builder.begin_body()
    builder.add_compute(ns, preds=[-reach])
    return builder.build()


def two_lane_job(*, host_ns: int, device_ns: int) -> JobGraph:
    """One rank: its host issues, its device works after the host and after its own last work."""
    builder = TraceBuilder(rank=0, world_size=1, groups=[GroupRecord(ranks=(0,))])
    builder.begin_body()
    builder.add_compute(host_ns, preds=[-2])
    builder.add_compute(device_ns, preds=[0, -1], lane="stream 0")
    return job_from_traces({0: builder.build()})


def test_ends_of_a_step_are_those_of_all_lanes() -> None:
    """The first step ends with the device, not with the host that issued it."""
    graph = two_lane_job(host_ns=10, device_ns=100)
    timeline = simulate(graph, RecordedDurations(graph), steps=2)
    assert timeline.step_end_ns_TDR[:, 0, 0].tolist() == [110, 210]
    assert np.diff(timeline.step_end_ns_TDR[:, 0, 0]).tolist() == [100]
