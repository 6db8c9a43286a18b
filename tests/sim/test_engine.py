"""The engine against the oracle, and the distributions that any re-timing must obey."""

from __future__ import annotations

from dataclasses import replace
from operator import add
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prismscale.durations.source import NEVER
from prismscale.errors import StuckError, UsageError
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import GroupRecord, RankTrace
from prismscale.graph.verify import verify
from prismscale.sim.engine import Engine
from prismscale.sim.program import ClassProgram, compile_job
from prismscale.sim.timeline import Timeline, simulate
from support.jobs import RecordedDurations, TableDurations, job_from_traces, pipeline_job
from support.oracle import expand, reachable, simulate_ranks
from support.strategies import Job, durations, jobs

thorough = settings(max_examples=150, deadline=None)


def assert_equals_oracle(
    graph: JobGraph, table: TableDurations, *, steps: int, with_prologue: bool, draws: int = 1
) -> None:
    """Every step end in every draw, and every node time in the first, to the nanosecond."""
    timeline = simulate(
        graph,
        table,
        steps=steps,
        draws=draws,
        ranks=range(graph.world_size),
        with_prologue=with_prologue,
    )
    for draw in range(draws):
        truth = simulate_ranks(graph, table, steps=steps, with_prologue=with_prologue, draw=draw)
        assert truth.unfinished == []
        expected = {(r, t): timeline.step_end_ns_TDR[t, draw, r] for r, t in truth.step_end}
        assert truth.step_end == expected
        if draw == 0:
            assert truth.start == node_times(timeline, "start_ns_N")
            assert truth.ready == node_times(timeline, "ready_ns_N")
            assert truth.end == node_times(timeline, "end_ns_N")


def node_times(timeline: Timeline, column: str) -> dict[tuple[int, int], int]:
    """A column of all kept ranks by (rank, stream position)."""
    return {
        (rank, kept.first_position + row): time
        for rank, kept in timeline.ranks.items()
        for row, time in enumerate(getattr(kept, column).tolist())
    }


@given(st.data())
@thorough
def test_engine_equals_oracle(data: st.DataObject) -> None:
    """On random jobs, with and without the prologue, every time is the oracle's."""
    job = data.draw(jobs())
    steps = data.draw(st.integers(1, 4))
    table = data.draw(durations(job.graph, steps=steps))
    assert_equals_oracle(job.graph, table, steps=steps, with_prologue=data.draw(st.booleans()))


@given(st.data())
@thorough
def test_draws_equal_oracle(data: st.DataObject) -> None:
    """Each draw of a vectorised run is what the oracle says of that draw alone."""
    job = data.draw(jobs(max_ranks=8))
    draws = data.draw(st.integers(2, 4))
    table = data.draw(durations(job.graph, steps=2, draws=draws))
    assert_equals_oracle(job.graph, table, steps=2, with_prologue=True, draws=draws)


def all_times(graph: JobGraph, table: TableDurations) -> dict[tuple[int, int], int]:
    """End of every node of every rank in two steps."""
    timeline = simulate(graph, table, steps=2, ranks=range(graph.world_size))
    return node_times(timeline, "end_ns_N")


def added(one: TableDurations, other: TableDurations) -> TableDurations:
    """Durations summed node by node."""
    return TableDurations(
        prologues={c: list(map(add, row, other.prologues[c])) for c, row in one.prologues.items()},
        bodies={
            c: [list(map(add, a, b)) for a, b in zip(steps, other.bodies[c], strict=True)]
            for c, steps in one.bodies.items()
        },
    )


def delay(
    table: TableDurations, rank_class: RankClass, node: int, member: int, ns: int
) -> TableDurations:
    """``table`` with one member's computation made longer in step 0."""
    extra = np.where(np.arange(rank_class.size) == member, ns, 0)
    row = list(table.bodies[rank_class.index][0])
    index = node - rank_class.trace.n_prologue
    row[index] = row[index] + extra
    bodies = {**table.bodies, rank_class.index: [row, *table.bodies[rank_class.index][1:]]}
    return TableDurations(prologues=table.prologues, bodies=bodies)


def tables(graph: JobGraph, *, steps: int) -> TableDurations:
    """The recorded durations as tables that a test may edit."""
    recorded = RecordedDurations(graph)
    classes = range(len(graph.classes))
    return TableDurations(
        prologues={c: list(recorded.prologue(c)) for c in classes},
        bodies={c: [list(recorded.body(c, k)) for k in range(steps)] for c in classes},
    )


@given(jobs())
@thorough
def test_every_rank_finds_its_own_groups(job: Job) -> None:
    """Classes, families and slots lead each rank back to the groups that its mesh gave it."""
    found = {rank: program.groups for rank, program in expand(job.graph).items()}

    assert job.groups_of == found


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_longer_durations_never_make_anything_earlier(data: st.DataObject) -> None:
    """Times are monotone in durations: the reason why waiting can be derived and not stored."""
    job = data.draw(jobs())
    table = data.draw(durations(job.graph, steps=2))
    longer = data.draw(durations(job.graph, steps=2))

    before = all_times(job.graph, table)
    after = all_times(job.graph, added(table, longer))

    assert all(after[node] >= time for node, time in before.items())


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_delay_moves_only_what_depends_on_it(data: st.DataObject) -> None:
    """A slower node changes the times of nodes that can be reached from it, and of no other."""
    job = data.draw(jobs())
    table = data.draw(durations(job.graph, steps=2))
    delayed = data.draw(st.sampled_from(job.graph.classes))
    node = int(np.flatnonzero(delayed.trace.kind_N == NodeKind.COMPUTE)[-1])
    member = data.draw(st.integers(0, delayed.size - 1))
    slow = delay(table, delayed, node, member, 10**9)
    rank = int(delayed.members_M[member])

    before, after = all_times(job.graph, table), all_times(job.graph, slow)

    changed = {n for n, time in before.items() if after[n] != time}
    assert changed <= reachable(job.graph, (rank, node), steps=2)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_order_of_classes_does_not_matter(data: st.DataObject) -> None:
    """Classes may be advanced in any order; times are the same."""
    job = data.draw(jobs())
    table = data.draw(durations(job.graph, steps=2))
    order = data.draw(st.permutations(range(len(job.graph.classes))))
    graph = replace(
        job.graph,
        classes=tuple(replace(job.graph.classes[o], index=n) for n, o in enumerate(order)),
    )
    shuffled = TableDurations(
        prologues={n: table.prologues[o] for n, o in enumerate(order)},
        bodies={n: table.bodies[o] for n, o in enumerate(order)},
    )

    assert all_times(job.graph, table) == all_times(graph, shuffled)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_extended_run_equals_long_run(data: st.DataObject) -> None:
    """Steps added one after the other give the times of a run that knew of them all."""
    job = data.draw(jobs())
    table = data.draw(durations(job.graph, steps=3))
    ends: dict[tuple[int, int], NDArray[np.int64]] = {}

    def step_end(index: int, step: int, end: NDArray[np.int64]) -> None:
        ends[index, step] = np.maximum(ends.get((index, step), 0), end.ravel())

    engine = Engine(
        compile_job(job.graph),
        table,
        steps=0,
        with_prologue=True,
        on_step_end=step_end,
    )
    for steps in data.draw(st.sampled_from([(1, 2, 3), (3,), (2, 1, 3)])):
        engine.extend(steps)
        engine.run()

    whole = simulate(job.graph, table, steps=3, with_prologue=True)
    for (index, step), end in ends.items():
        members_M = job.graph.classes[index].members_M
        expected = whole.step_end_ns_TDR[step, 0, members_M]
        assert np.broadcast_to(end, len(members_M)).tolist() == expected.tolist()


@st.composite
def jobs_with_a_live_rank(draw: st.DrawFn) -> tuple[Job, RankClass, TableDurations]:
    """A job, a class of one rank in it, and durations for three steps."""
    job = draw(jobs())
    single = [c for c in job.graph.classes if c.size == 1]
    assume(single)
    return job, draw(st.sampled_from(single)), draw(durations(job.graph, steps=3))


@given(st.data())
@thorough
def test_live_rank_that_keeps_its_times_changes_nothing(data: st.DataObject) -> None:
    """A class whose arrivals are told from outside meets the others as if it were simulated."""
    job, live, table = data.draw(jobs_with_a_live_rank())
    with_prologue = data.draw(st.booleans())
    expected = simulate(
        job.graph, table, steps=3, with_prologue=with_prologue, ranks=live.members_M.tolist()
    ).ranks[int(live.members_M[0])]

    ends = live_run(job.graph, live, table, steps=3, with_prologue=with_prologue)

    assert ends == expected.end_ns_N.tolist()


@given(st.data())
@thorough
def test_computation_that_is_left_for_later_takes_as_long(data: st.DataObject) -> None:
    """Taken on only as far as the live rank's arrivals need it, the others do all they did."""
    job, live, table = data.draw(jobs_with_a_live_rank())

    at_once = live_run(job.graph, live, table, steps=3, with_prologue=False)
    held = live_run(job.graph, live, table, steps=3, with_prologue=False, holds=True)

    assert held == at_once


def live_run(
    graph: JobGraph,
    live: RankClass,
    table: TableDurations,
    *,
    steps: int,
    with_prologue: bool,
    holds: bool = False,
) -> list[int]:
    """End of every node of ``live``, run here while the engine runs everybody else (``holds``: no
    further than it must)."""
    program = compile_job(graph)
    engine = Engine(program, table, steps=steps, with_prologue=with_prologue, external=[live.index])
    trace, own = live.trace, program.classes[live.index]
    first = 0 if with_prologue else trace.n_prologue
    ends: dict[int, int] = {}

    def end_of(position: int) -> int:
        if position not in ends:
            told = engine.end_of(live.index, position)
            assert told is not None, "the engine must have answered by now"
            ends[position] = int(told.flat[0])
        return ends[position]

    for x in range(first, trace.n_prologue + steps * trace.n_body):
        sources = [x - d for d in own.preds[own.template(x)] if x - d >= first]
        start = max(map(end_of, sources), default=0)
        if own.kinds[own.template(x)] == NodeKind.COMPUTE:
            ends[x] = start + duration_of(table, own, x)
        else:
            engine.arrive(live.index, x, start)
            later = engine.advance(start if holds else None)
            while later is not None and engine.end_of(live.index, x) is None:
                later = engine.advance(later)
    engine.run()
    return [end_of(x) for x in range(first, trace.n_prologue + steps * trace.n_body)]


def duration_of(table: TableDurations, program: ClassProgram, position: int) -> int:
    """Duration of a computation of a class of one member."""
    if position < program.n_prologue:
        value = table.prologue(program.index)[position]
    else:
        step, node = divmod(position - program.n_prologue, program.n_body)
        value = table.body(program.index, step)[node]
    return int(np.asarray(value).flat[0])


@given(jobs())
@thorough
def test_every_end_time_is_forgotten_once_a_step(job: Job) -> None:
    """Memory does not grow with steps: each body node that is kept is freed by one body node."""
    for program in compile_job(job.graph).classes:
        body = range(program.n_prologue, program.n_prologue + program.n_body)
        freed = [
            program.n_prologue + (i - d - program.n_prologue) % program.n_body
            for i in body
            for d in program.frees[i]
        ]
        assert sorted(freed) == [i for i in body if program.kept[i]]


def two_groups(rank: int, order: tuple[int, int]) -> RankTrace:
    """A rank that waits for a collective in one group before it calls the next."""
    both = [GroupRecord(ranks=(0, 1), name=n) for n in ("world", "red", "blue")]
    builder = TraceBuilder(rank=rank, world_size=2, groups=both)
    last = builder.add_compute(1)
    builder.begin_body()
    for group_index in order:
        last = builder.add_communication(
            CollectiveOp.ALL_REDUCE,
            8,
            group_index=group_index,
            preds=[last],
            site=f"train.py:{group_index}",
        )
    builder.add_compute(1, preds=[last])
    return builder.build()


def test_groups_used_in_opposite_order_are_reported() -> None:
    """A job that is legal group by group but cannot run names ranks, groups and call sites."""
    graph = job_from_traces({0: two_groups(0, (1, 2)), 1: two_groups(1, (2, 1))})
    verify(graph)

    with pytest.raises(StuckError) as caught:
        simulate(graph, RecordedDurations(graph))

    message = str(caught.value)
    assert "2 of 2 rank classes cannot advance" in message
    assert "rank 0 waits for rank 1 in use 0 of all_reduce of 8 bytes in group 'red'" in message
    assert "rank 1 waits for rank 0 in use 0 of all_reduce of 8 bytes in group 'blue'" in message
    assert "train.py:1" in message
    assert "train.py:2" in message


@pytest.mark.parametrize("culprit", [0, 3, 5])
def test_rank_that_never_comes_is_named(culprit: int) -> None:
    """A rank that hangs in one step is the only one that is awaited and never waits itself."""
    graph = pipeline_job(2, 2, 2, 4)
    rank_class = graph.classes[int(graph.class_of_R[culprit])]
    member = int(graph.member_of_R[culprit])
    table = tables(graph, steps=3)
    row = table.bodies[rank_class.index][1] = list(table.bodies[rank_class.index][1])
    row[0] = np.where(np.arange(rank_class.size) == member, NEVER, row[0])

    hangs = simulate(graph, table, steps=3, watch_hangs=True).hangs

    awaited = {r for h in hangs for r in h.missing}
    waiting = {r for h in hangs for r in h.group if r not in h.missing}
    assert awaited - waiting == {culprit}
    neighbour = culprit ^ 1
    assert (
        f"rank {neighbour} waits for rank {culprit}: all_reduce of 100,000 bytes in group 'tp' "
        "of 2, train.py:30"
    ) in [h.sentence() for h in hangs]


def test_healthy_job_has_no_hangs() -> None:
    """Watching for hangs finds none where everybody comes."""
    graph = pipeline_job(2, 2, 2, 4)

    assert simulate(graph, RecordedDurations(graph), watch_hangs=True).hangs == ()


def test_pipeline_bubble_has_its_textbook_length() -> None:
    """1F1B without communication cost: step time is (m + p - 1) microbatches, not m."""
    graph = pipeline_job(4, 1, 1, 8)
    table = tables(graph, steps=1)
    for rank_class in graph.classes:
        is_block = np.isin(rank_class.trace.body_ns_SB[0], [10_000, 20_000])
        row = np.where(is_block, rank_class.trace.body_ns_SB[0], 0)
        table.bodies[rank_class.index] = [row.tolist()]

    assert simulate(graph, table, steps=1).step_ns == (8 + 4 - 1) * (2 * 10_000 + 2 * 20_000)


@pytest.mark.parametrize(
    ("options", "words"), [({"steps": 0}, "at least 1"), ({"ranks": [8]}, "0 … 7")]
)
def test_bad_requests_say_what_is_allowed(options: dict[str, Any], words: str) -> None:
    """No step at all, or a rank that is not there, is refused with the allowed range."""
    graph = pipeline_job(2, 2, 2, 1)

    with pytest.raises(UsageError, match=words):
        simulate(graph, RecordedDurations(graph), **options)
