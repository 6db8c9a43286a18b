"""The typical step: the median of steps that take the durations of captured ones."""

from __future__ import annotations

import numpy as np
import pytest

from prismscale.durations.faults import Faults
from prismscale.errors import UsageError
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import NodeKind
from prismscale.sim.retime import MOST_SAMPLED_STEPS, simulate_typical
from prismscale.sim.timeline import simulate
from support.jobs import RecordedDurations, job_from_traces
from support.traces import joined_traces


def joined_job(*computes_ns: list[int], tail_ns: list[int] | None = None) -> JobGraph:
    """A job of such ranks, each in a class of its own."""
    return job_from_traces(joined_traces(*computes_ns, tail_ns=tail_ns))


def test_the_typical_step_waits_for_whoever_is_late() -> None:
    """Ranks that are late in turn are each of median length 20, and their job of 30."""
    graph = joined_job([10, 30, 20], [30, 10, 20])
    retimed = simulate_typical(graph, RecordedDurations(graph), samples=3)

    assert sorted(retimed.job_step_ns_T.tolist()) == [25, 35, 35]
    assert retimed.timeline.step_ns == 35


def test_the_last_step_shown_is_the_median_one() -> None:
    """Of steps 15 … 95 long, the one of 55, with the three before it."""
    samples = [70, 10, 50, 90, 30]
    graph = joined_job(samples, samples)
    retimed = simulate_typical(graph, RecordedDurations(graph), samples=5, ranks=[0])
    timeline = retimed.timeline

    assert np.median(retimed.job_step_ns_T) == 55
    assert timeline.job_step_ns_TD[:, 0].tolist()[-3:] == [75, 15, 55]
    seen = timeline.ranks[0]
    trace = graph.classes[seen.class_index].trace
    nodes = [trace.template(seen.first_position + row) for row in range(len(seen.end_ns_N))]
    computes = [row for row, node in enumerate(nodes) if trace.kind_N[node] == NodeKind.COMPUTE]
    lasted = (seen.end_ns_N - seen.start_ns_N)[computes]
    assert max(lasted[-2:]) == 50


def test_a_job_of_one_sample_is_simulated_until_it_settles() -> None:
    """Its timeline is that of a plain simulation of as many steps; all settled ones are alike."""
    graph = joined_job([10], [30])
    retimed = simulate_typical(graph, RecordedDurations(graph), samples=1)

    steps = len(retimed.timeline.step_end_ns_TDR)
    plain = simulate(graph, RecordedDurations(graph), steps=steps)
    assert np.array_equal(retimed.timeline.step_end_ns_TDR, plain.step_end_ns_TDR)
    assert set(retimed.job_step_ns_T.tolist()) == {retimed.step_ns}


def test_many_samples_are_bounded() -> None:
    """A long capture is not replayed whole."""
    graph = joined_job(list(range(1, 1001)), [1] * 1000)
    retimed = simulate_typical(graph, RecordedDurations(graph), samples=1000)

    assert len(retimed.job_step_ns_T) == MOST_SAMPLED_STEPS
    assert len(retimed.rank_step_ns_TR) == MOST_SAMPLED_STEPS


def test_a_rank_feels_the_tail_of_another_one_step_later() -> None:
    """A step's time is that of the rank that ends last; another's same step is as long as the step
    before it was."""
    graph = joined_job([10, 10, 10], [10, 10, 10], tail_ns=[0, 0, 20])
    retimed = simulate_typical(graph, RecordedDurations(graph), samples=3)

    job, first, last = (
        ns_T.tolist() for ns_T in (retimed.job_step_ns_T, *retimed.rank_step_ns_TR.T)
    )
    assert sorted(job) == [15, 15, 35]
    assert last == job
    assert first == [job[-1], *job[:-1]]


@pytest.mark.parametrize(
    ("hang", "told"),
    [
        ({0: 10**9}, "from 0 to 10,000"),
        ({0: -1}, "from 0 to 10,000"),
        ({r: r + 1 for r in range(8)}, "8 different steps; give 7 or fewer"),
    ],
)
def test_hangs_that_cannot_be_simulated_are_refused(hang: dict[int, int], told: str) -> None:
    """All steps before a hang are simulated, and infinite times add up."""
    with pytest.raises(UsageError, match=told):
        Faults(hang=hang)


def test_nodes_are_kept_from_a_step_on() -> None:
    """They have the times and positions that they have when all are kept."""
    graph = joined_job([10, 30, 20], [30, 10, 20])
    whole, late = (
        simulate(graph, RecordedDurations(graph), steps=6, ranks=[0, 1], kept_from=kept_from)
        for kept_from in (0, 4)
    )
    assert np.array_equal(late.step_end_ns_TDR, whole.step_end_ns_TDR)
    for rank, kept in late.ranks.items():
        n_body = graph.classes[kept.class_index].trace.n_body
        assert kept.first_position == whole.ranks[rank].first_position + 4 * n_body
        assert np.array_equal(kept.end_ns_N, whole.ranks[rank].end_ns_N[4 * n_body :])
