"""What a job does only in some steps: put together, scheduled, written out, costed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.durations.stored_events import EventFacts, StoredEvent, load_events, save_events
from prismscale.errors import FormatError
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.facts import CaptureFacts, StepFacts
from prismscale.graph.node import CollectiveOp
from prismscale.graph.periodic import (
    Calendar,
    Schedule,
    concatenated,
    ordinary_step,
    part_of,
    periodic_events,
    schedule_of,
    scheduled,
    with_ordinary_step,
)
from prismscale.graph.trace import GroupRecord, RankTrace
from prismscale.sim.timeline import simulate, simulate_steady
from support.jobs import RecordedDurations, job_from_traces

WORLD = (GroupRecord(ranks=(0, 1)),)


def trace(rank: int = 0, *, setup: int = 5, samples: int = 1) -> RankTrace:
    """A prologue of one span; a step computes, then reduces on a lane of its own. The reduction of
    a step follows that of the step before and is awaited by the next step's computation."""
    builder = TraceBuilder(rank=rank, world_size=2, groups=WORLD)
    builder.add_compute(setup)
    builder.begin_body()
    # Position 1: after the last span and the last reduction of the step before.
    builder.add_compute([10 + k for k in range(samples)], label="forward")
    builder.add_communication(CollectiveOp.ALL_REDUCE, 8, preds=[1, 0], durations_ns=3)
    builder.add_compute(20, preds=[1], label="backward")
    built = builder.build(facts=CaptureFacts(calls_in_prologue=1, watched_steps=12))
    # Distances across the border: the span before lies 1 back, the reduction before 2 back.
    return replace(
        built,
        pred_start_N1=np.array([0, 0, 2, 4, 5], dtype=np.int32),
        pred_distance_P=np.array([1, 2, 1, 3, 2], dtype=np.int32),
    )


def logging_step(own: RankTrace, number: int, *, extra_ns: int = 100) -> RankTrace:
    """The ordinary step with a span and a reduction more at its beginning."""
    step = ordinary_step(own)
    builder = TraceBuilder(rank=own.rank, world_size=2, groups=WORLD)
    builder.begin_body()
    builder.add_compute(extra_ns, preds=[-1, -2], label="log")
    builder.add_communication(
        CollectiveOp.ALL_REDUCE, 4, preds=[0, -2], durations_ns=3, site="train.py:9"
    )
    more = builder.build()
    first = part_of(more, 0, 2, more.body_ns_SB)
    first = replace(first, lanes=own.lanes, labels=own.labels, sites=("train.py:9",))
    body = concatenated([first, step], step)
    return replace(body, facts=CaptureFacts(step=StepFacts(number=number, work="log")))


def calendar_of(*schedules: tuple[tuple[int, ...], int]) -> Calendar:
    """Of the steps in which each event was seen, and how often it comes."""
    return Calendar(schedules=tuple(Schedule(numbers=n, every=e) for n, e in schedules))


def distances(found: RankTrace) -> list[list[int]]:
    """Predecessors of each node, as distances."""
    return [sorted(found.predecessors(i).tolist()) for i in range(found.n_nodes)]


@given(st.integers(1, 6))
def test_ordinary_steps_in_a_row_keep_their_edges(count: int) -> None:
    """Written out, they are what the body repeats."""
    own = trace()
    step = ordinary_step(own)
    many = concatenated([step] * count, step)
    assert distances(many) == distances(step) * count


def test_after_an_unusual_step_edges_lead_to_the_same_places() -> None:
    """To the last span and the last reduction of the step before, however long that was."""
    own = trace()
    step = ordinary_step(own)
    both = concatenated([logging_step(own, 6), step], step)
    assert distances(both)[-3:] == distances(step)
    assert both.lane_N[5 - 1] == own.lane_N[-1]


def test_places_beyond_the_beginning_lie_in_ordinary_steps() -> None:
    """An edge that reaches over a whole step without its lane."""
    own = trace()
    step = ordinary_step(own)
    silent = part_of(own, 1, 2, own.body_ns_SB[:, :1])
    row = concatenated([silent, step], step)
    # The reduction of the step before the silent one: over one span and the three nodes of a step.
    assert distances(row)[2] == [1, 4]


@pytest.mark.parametrize(
    ("numbers", "every"), [([4, 7, 10], 3), ([3, 5, 9], 2), ([11], 10), ([6], 5), ([1], 0)]
)
def test_how_often_an_event_comes(numbers: Sequence[int], every: int) -> None:
    """By its distances, or by how long it took to come."""
    assert schedule_of(numbers, 12, [6, 11]).every == every


def test_what_did_not_come_again_came_once() -> None:
    """Step 3 was unusual, and neither 5 nor any later one."""
    assert schedule_of([3], 12, [3]).every == 0
    assert schedule_of([3], 12, [3, 5]).every == 2


def test_of_two_events_in_one_step_it_is_the_rarer() -> None:
    """Logging every 2 and evaluation every 5 steps, and both together every 10."""
    calendar = calendar_of(((3, 5, 7, 9), 2), ((6,), 5), ((11,), 10))
    found = [calendar.event_in(n) for n in (2, 3, 6, 9, 11, 16, 21)]
    assert found == [None, 0, 1, 0, 2, 1, 2]
    assert calendar.rates() == [0.4, 0.1, 0.1]
    assert all(calendar.is_known(n) for n in range(1, 40))


def test_events_that_were_never_seen_together_are_not_known() -> None:
    """Logging and a checkpoint every 4, evaluation every 5: all three in step 21."""
    calendar = calendar_of(((3, 7), 4), ((5, 9), 4), ((6,), 5), ((11,), 10))
    assert [n for n in range(1, 22) if not calendar.is_known(n)] == [21]


def test_what_came_once_has_no_rate() -> None:
    """It is in no mean over a long training."""
    assert calendar_of(((4,), 0), ((3, 5), 2)).rates() == [0.0, 0.5]


def test_ranks_without_anything_unusual_take_their_ordinary_step() -> None:
    """Only rank 0 logs."""
    traces = {0: trace(0), 1: trace(1)}
    (event,) = periodic_events(traces, {0: [logging_step(traces[0], n) for n in (3, 5, 7)]})
    assert event.schedule == Schedule(numbers=(3, 5, 7), every=2)
    assert event.traces[0].n_nodes == 5
    assert distances(event.traces[1]) == distances(ordinary_step(traces[1]))


def test_different_work_is_another_event() -> None:
    """Both ranks in one step, one of them in another."""
    traces = {0: trace(0), 1: trace(1)}
    found = {
        0: [logging_step(traces[0], n) for n in (3, 6)],
        1: [logging_step(traces[1], 6)],
    }
    assert [e.schedule.first for e in periodic_events(traces, found)] == [3, 6]


def test_an_event_costs_what_its_step_takes_longer() -> None:
    """100 of computation and 3 of communication that the next span waits for."""
    traces = {r: trace(r) for r in (0, 1)}
    graph = job_from_traces(traces)
    step_ns = simulate_steady(graph, RecordedDurations(graph))[1].step_ns
    pairs = {r: with_ordinary_step(logging_step(t, 6), t) for r, t in traces.items()}
    with_event = job_from_traces(pairs)
    both_ns = simulate_steady(with_event, RecordedDurations(with_event))[1].step_ns
    assert both_ns - 2 * step_ns == 103


@given(st.integers(2, 12), st.lists(st.integers(2, 12), unique=True, max_size=3))
@settings(max_examples=40, deadline=None)
def test_a_program_that_is_written_out_ends_its_steps_when_it_would(
    until: int, logged: list[int]
) -> None:
    """Simulated from the beginning: each logging step is longer by its span, no other is."""
    own = trace()
    calendar = calendar_of(*(((n,), 0) for n in logged))
    events = [logging_step(own, n) for n in logged]
    longer = scheduled(own, events, calendar, until)
    traces = {0: longer, 1: replace(longer, rank=1)}
    graph = job_from_traces(traces)
    timeline = simulate(graph, RecordedDurations(graph), steps=1, with_prologue=True, ranks=[0])
    plain = job_from_traces({0: own, 1: replace(own, rank=1)})
    steps = until - 1
    base = simulate(plain, RecordedDurations(plain), steps=steps, with_prologue=True)
    inside = sum(2 <= n < until for n in logged)
    end_ns = int(timeline.step_end_ns_TDR.max())
    assert end_ns - int(base.step_end_ns_TDR.max()) == 103 * inside


def test_where_steps_begin_is_told() -> None:
    """Of those that are written out: what nobody foresaw may happen there."""
    own = trace()
    longer = scheduled(own, [logging_step(own, 3)], calendar_of(((3,), 0)), 5)
    assert longer.facts.step_starts == (1, 4, 9)
    assert longer.n_prologue == 12


def test_sampled_steps_take_turns() -> None:
    """As virtual peers replay them."""
    own = trace(samples=3)
    longer = scheduled(own, [], calendar_of(), 6)
    assert longer.prologue_ns[1::3].tolist() == [10, 11, 12, 10]


def test_events_are_read_as_they_were_written(tmp_path) -> None:
    """Graphs and table; a run without any has no file."""
    assert load_events(tmp_path) == []
    facts = EventFacts(numbers=(3, 5, 7, 9), every=2, site="train.py:9")
    graph = job_from_traces({0: trace(0), 1: trace(1)})
    save_events([StoredEvent(facts=facts, graph=graph)], tmp_path)
    (event,) = load_events(tmp_path)
    assert event.facts == facts
    assert event.graph.n_rank_nodes == graph.n_rank_nodes


@pytest.mark.parametrize("text", ["{", "[]", '{"events": 3}', '{"events": [{"numbers": []}]}'])
def test_a_damaged_table_is_refused(tmp_path, text: str) -> None:
    """By name, whatever is in it."""
    (tmp_path / "periodic.json").write_text(text)
    with pytest.raises(FormatError, match=r"periodic\.json"):
        load_events(tmp_path)
