"""Jitter that ranks of one machine share: measured in slices, followed beside live ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from prismscale.durations.source import NEVER
from prismscale.graph.facts import CaptureFacts, CoRunFacts
from prismscale.graph.job_graph import JobGraph
from prismscale.host_comm.shared_jitter import SHORTEST_NS, Spans, shared_jitter
from prismscale.live.coordinator.rank_jitter import KEPT, CommonJitter, MachineTime, share_jitter
from support.jobs import pipeline_job
from support.traces import loop_trace

STEPS, NODES = 200, 4
USUAL_NS = 1_000_000


def spans(slowness_SB: NDArray[np.float64], *, apart: int = 4, late_ns: int = 0) -> Spans:
    """Of a rank whose spans begin at regular times, ``apart`` usual durations from each other."""
    places = np.arange(slowness_SB.size).reshape(slowness_SB.shape)
    began = places * apart * USUAL_NS + late_ns
    own = np.rint(USUAL_NS * slowness_SB).astype(np.int64)
    return Spans.of_steps(began, began + own, own)


def jitter(seed: int) -> NDArray[np.float64]:
    """How slow each span is."""
    return np.exp(np.random.default_rng(seed).normal(0, 0.3, (STEPS, NODES)))


def test_ranks_that_are_slow_together_share_their_jitter() -> None:
    """All of it, where nothing else makes them slow."""
    slow = jitter(0)
    assert shared_jitter(spans(slow), [spans(slow)]) == pytest.approx(1.0)


def test_ranks_that_are_slow_by_themselves_share_none() -> None:
    """Each has its own."""
    assert shared_jitter(spans(jitter(0)), [spans(jitter(1))]) < 0.15


def test_ranks_that_compute_at_different_times_share_none() -> None:
    """One computes while the other waits."""
    slow = np.minimum(jitter(0), 1.5)
    assert shared_jitter(spans(slow), [spans(slow, late_ns=2 * USUAL_NS)]) < 0.05


def test_half_of_the_variance_in_common_is_half_of_a_correlation() -> None:
    """Two ranks, a machine's slowness and one of each rank's own."""
    ours, theirs, common = (jitter(seed) for seed in range(3))
    assert shared_jitter(spans(ours * common), [spans(theirs * common)]) == pytest.approx(
        0.5, abs=0.1
    )


def test_a_rank_without_company_shares_nothing() -> None:
    """Nor does one that hardly computes."""
    assert shared_jitter(spans(jitter(0)), []) == 0
    short = (jitter(0) * SHORTEST_NS / 4 / USUAL_NS, jitter(0))
    assert shared_jitter(spans(short[0]), [spans(short[1])]) == 0


def test_spans_come_back_from_their_table() -> None:
    """As they were."""
    made = spans(jitter(0))
    assert np.array_equal(Spans.from_table(made.table()).table(), made.table())


# One all-reduce a step of a computation that usually takes 1,000 ns.
TRACE = loop_trace(2, 8)
FIRST = next(TRACE.communications(TRACE.n_prologue, TRACE.n_nodes))


def seen(*computed_ns: int, share: float = 1.0, factor: float = 1.0) -> MachineTime:
    """By a live rank that computes all the time."""
    machine, now = MachineTime(TRACE, share), 0
    for step, ns in enumerate(computed_ns):
        now += ns
        machine.observe(FIRST + step * TRACE.n_body, now, ns, factor)
    return machine


def test_where_nothing_was_seen_computation_takes_as_usual() -> None:
    """From any time on."""
    assert seen().end(500, 100) == 600
    assert seen(1_000).end(5_000, 100) == 5_100


def test_what_runs_while_the_live_rank_is_slow_is_as_slow() -> None:
    """Twice as slow; and of what goes on afterwards, only the part before."""
    machine = seen(1_000, 2_000)
    assert machine.end(1_000, 500) == pytest.approx(2_000)
    assert machine.end(2_000, 1_000) == pytest.approx(3_500)


def test_only_the_share_of_the_jitter_that_is_common_is_taken_over() -> None:
    """A share is an exponent: durations are products."""
    assert seen(4_000, share=0.5).end(0, 500) == pytest.approx(1_000)


def test_slowness_is_told_from_the_speed_of_these_days() -> None:
    """Which durations have already."""
    assert seen(2_000, factor=2.0).end(0, 500) == pytest.approx(500)


def test_a_machine_is_as_usual_while_the_live_rank_waits() -> None:
    """It tells nothing then."""
    machine = MachineTime(TRACE, 1.0)
    machine.observe(FIRST, 3_000, 2_000, 1.0)
    # 2,000 ns of slow computing and 1,000 of waiting: 2,000 of work, wherever in the 3,000.
    assert machine.end(0, 2_000) == pytest.approx(3_000)


def test_a_rank_that_did_less_than_usual_makes_nobody_fast() -> None:
    """No machine is that much faster than it is."""
    assert seen(1_000, 1).end(1_000, 1_000) > 1_990


@given(st.integers(0, 60_000), st.integers(0, 60_000))
def test_one_rank_and_many_end_at_the_same_times(start: int, duration: int) -> None:
    """The line is the same."""
    machine = seen(900, 2_300, 1_100, 700, 5_000, share=0.6)
    assert machine.ends(np.array([start]), duration)[0] == pytest.approx(
        machine.end(start, duration), abs=1
    )


def test_the_past_is_forgotten_at_last() -> None:
    """What is still asked for stays."""
    machine = seen(*[2_000] * (3 * KEPT))
    assert machine.end(3 * KEPT * 2_000 - 2_000, 500) == pytest.approx(3 * KEPT * 2_000 - 1_000)
    assert len(machine._times) <= 2 * KEPT


def measured(graph: JobGraph, share: float) -> JobGraph:
    """A job whose ranks were timed side by side."""
    co_run = CoRunFacts(issue_ns=0, common_jitter=share, ranks=())
    classes = [
        replace(c, trace=replace(c.trace, facts=CaptureFacts(co_run=co_run))) for c in graph.classes
    ]
    return replace(graph, classes=tuple(classes))


def test_a_job_that_was_not_timed_side_by_side_is_replayed_as_it_is() -> None:
    """Nothing is known of common jitter."""
    graph = pipeline_job(2, 2, 1, 3)
    assert share_jitter(graph, [0], lambda rank: 0) == (graph, None)


def test_virtual_ranks_keep_the_jitter_that_is_their_own() -> None:
    """With 0.6 in common, the power 0.8 of it; communications and live ranks keep all."""
    graph = measured(pipeline_job(2, 2, 1, 3, samples=4), 0.6)
    shared, _ = share_jitter(graph, [0], lambda rank: 0)
    for before, after in zip(graph.classes, shared.classes, strict=True):
        rows, own = before.trace.body_ns_SB, after.trace.body_ns_SB
        if 0 in before.members_M:
            assert np.array_equal(own, rows)
            continue
        computes = before.trace.computes_B
        assert np.array_equal(own[:, ~computes], rows[:, ~computes])
        usual = np.median(rows, axis=0)
        expected = usual * (rows / np.maximum(usual, 1)) ** 0.8
        assert np.allclose(own[:, computes], expected[:, computes], atol=1)


def test_jitter_is_common_to_one_machine() -> None:
    """Ranks of another are as usual; what never ends does not."""
    graph = measured(pipeline_job(2, 2, 1, 3), 1)
    beside = CommonJitter(graph, 1.0, [0], lambda rank: rank % 2)
    trace = graph.classes[int(graph.class_of_R[0])].trace
    first = next(trace.communications(trace.n_prologue, trace.n_nodes))
    usual = 10 * int(trace.compute_ns_S[0])
    beside.observe(0, first, 10 * usual, 10 * usual, 1.0)
    for rank_class in graph.classes:
        ends = beside.ends(rank_class.index, np.zeros(1, dtype=np.int64), 1_000)
        slow_M = rank_class.members_M % 2 == 0
        assert ((np.broadcast_to(ends, rank_class.size) > 1_000) == slow_M).all()
        assert (beside.ends(rank_class.index, np.zeros(1, dtype=np.int64), NEVER) >= NEVER).all()
