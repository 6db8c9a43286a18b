"""Traces whose bodies begin at different steps are brought to one step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.errors import MismatchError
from prismscale.graph.assembly.align import aligned, unrolled
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.facts import CaptureFacts
from prismscale.graph.io import load_graph
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import RankTrace
from prismscale.graph.verify import verify
from prismscale.sim.timeline import simulate
from support.jobs import RecordedDurations, job_from_traces, pipeline_traces
from support.runs import TRAINER, results, run_job, write_program
from support.strategies import Job, jobs

LATER = """    if rank and step == 4:
        torch.ones(1, requires_grad=True).sum().backward()
    step_ends()"""
"""Ranks above 0 do something else once, without talking about it."""


def end_ns(graph: JobGraph, steps: int) -> int:
    """When the last rank ends that many steps, counted from the program's beginning."""
    timeline = simulate(graph, RecordedDurations(graph), steps=steps, with_prologue=True)
    return int(timeline.step_end_ns_TDR[-1].max())


def one_rank_of_two(rank: int, *, first: int, each: int) -> RankTrace:
    """``first`` all-reduces before the steps, ``each`` in a step."""
    builder = TraceBuilder(rank=rank, world_size=2)
    for _ in range(first):
        builder.add_communication(CollectiveOp.ALL_REDUCE, 4)
    builder.begin_body()
    for _ in range(each):
        builder.add_communication(CollectiveOp.ALL_REDUCE, 4)
    return builder.build()


@given(jobs(), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_an_unrolled_program_takes_the_same_time(job: Job, bodies: int) -> None:
    """A step moved into the prologue is the step that it was."""
    longer = tuple(replace(c, trace=unrolled(c.trace, bodies)) for c in job.graph.classes)
    assert end_ns(replace(job.graph, classes=longer), 2) == end_ns(job.graph, 2 + bodies)


def test_unrolling_counts_optimizer_calls() -> None:
    """The prologue has one period more of them for each step that it takes in."""
    trace = replace(
        pipeline_traces(1, 2, 1, 1)[0], facts=CaptureFacts(calls_per_step=2, calls_in_prologue=3)
    )
    assert unrolled(trace, 2).facts.calls_in_prologue == 7


def test_unrolled_steps_last_as_the_sampled_ones() -> None:
    """Sample after sample, from the first."""
    trace = pipeline_traces(1, 2, 1, 1, samples=2)[0]
    longer = unrolled(trace, 3).prologue_ns[trace.n_prologue :].reshape(3, -1)
    assert np.array_equal(longer, trace.body_ns_SB[[0, 1, 0]])


@given(st.lists(st.integers(0, 3), min_size=4, max_size=4))
@settings(max_examples=20, deadline=None)
def test_stages_that_settled_at_different_steps_are_one_job(later: list[int]) -> None:
    """However much later than the others each stage settled, all end their prologues together."""
    traces = pipeline_traces(4, 2, 1, 3)
    moved = [unrolled(t, n) for t, n in zip(traces.values(), later, strict=True)]
    graph = job_from_traces(dict(zip(traces, moved, strict=True)))
    verify(graph)
    assert end_ns(graph, 2) == end_ns(job_from_traces(traces), 2 + max(later))


def test_traces_that_agree_are_left_alone() -> None:
    """No copy is made of a graph in order."""
    graph = job_from_traces(pipeline_traces(2, 2, 1, 2))
    assert aligned(graph) is graph


@pytest.mark.parametrize(("first", "each"), [(3, 2), (2, 1)])
def test_a_mismatch_that_steps_do_not_explain_is_told(first: int, each: int) -> None:
    """A call too many is a program's mistake, not a step."""
    traces = {
        0: one_rank_of_two(0, first=2, each=2),
        1: one_rank_of_two(1, first=first, each=each),
    }
    with pytest.raises(MismatchError, match="makes only"):
        verify(job_from_traces(traces))


def test_a_live_rank_that_settled_early_meets_those_that_settled_late(tmp_path: Path) -> None:
    """It observes its steps where the others' bodies begin, and misses none of its calls."""
    script = write_program(tmp_path, TRAINER.replace("    step_ends()", LATER))
    done = run_job(tmp_path / "run", 4, "--live", 0, script)
    assert done.code == 0, done.err
    first, *others = load_graph(tmp_path / "run" / "graph").classes
    assert others
    assert {c.trace.facts.calls_in_prologue for c in others} == {
        first.trace.facts.calls_in_prologue
    }
    assert [r["uncovered"] for r in results(tmp_path / "run")["live"]] == [0]
