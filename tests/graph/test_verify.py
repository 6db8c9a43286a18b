"""The rules of a legal graph, each broken once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from prismscale.errors import GraphError, MismatchError
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace
from prismscale.graph.verify import verify
from support.jobs import job_from_traces, pipeline_job, pipeline_traces
from support.strategies import Job, jobs

Call = tuple[CollectiveOp, int, int]
"""(operation, bytes, peer)"""
REDUCE_8 = (CollectiveOp.ALL_REDUCE, 8, -1)


@given(jobs())
@settings(max_examples=80, deadline=None)
def test_legal_jobs_pass(job: Job) -> None:
    """Random legal jobs break no rule."""
    verify(job.graph)  # raises otherwise


def test_classes_must_hold_every_rank_once() -> None:
    """A rank without a class, or with two, is refused."""
    graph = pipeline_job(2, 2, 1, 1)
    lost = replace(graph.classes[1], members_M=np.array([2]))

    with pytest.raises(GraphError, match="do not partition the ranks"):
        verify(replace(graph, classes=(graph.classes[0], lost)))


def broken(column: str, at: int, value: int) -> JobGraph:
    """A two-stage job with one number of its first trace changed."""
    graph = pipeline_job(2, 1, 1, 1)
    trace = graph.classes[0].trace
    values = np.array(getattr(trace, column))
    values.flat[at] = value
    first = replace(graph.classes[0], trace=replace(trace, **{column: values}))
    return replace(graph, classes=(first, *graph.classes[1:]))


@pytest.mark.parametrize(
    ("column", "at", "value", "words"),
    [
        ("pred_distance_P", 0, 0, "does not lie before its node"),
        ("pred_start_N1", 2, -1, "rows run backwards"),
        ("prologue_ns", 0, -1, "negative duration"),
        ("body_ns_SB", 3, -1, "negative duration"),
        ("group_index_N", 0, 1, "a computation names a group"),
        ("group_index_N", 3, 9, "names none of the rank's groups"),
        ("group_index_N", 3, -1, "names none of the rank's groups"),
    ],
)
def test_malformed_traces_are_named(column: str, at: int, value: int, words: str) -> None:
    """Rules 2 and 3 name the trace and the fault."""
    with pytest.raises(GraphError, match=f"trace of rank 0: .*{words}"):
        verify(broken(column, at, value))


def trace_of(rank: int, body: list[Call], prologue: list[Call]) -> RankTrace:
    """A rank of two that makes some calls in one group, at lines of its own file."""
    world = [GroupRecord(ranks=(0, 1), name="world")]
    builder = TraceBuilder(rank=rank, world_size=2, groups=world)
    for part, calls in (("setup", prologue), ("train", body)):
        for line, (op, n_bytes, peer) in enumerate(calls, start=1):
            builder.add_communication(op, n_bytes, peer=peer, site=f"{part}{rank}.py:{line}")
        if part == "setup":
            builder.begin_body()
    builder.add_compute(1)
    return builder.build()


def pair(one: list[Call], other: list[Call], *, prologue: bool = False) -> JobGraph:
    """Two ranks that make the given calls in their steps, or before them."""
    bodies = [(one, []), (other, [])] if not prologue else [([], one), ([], other)]
    return job_from_traces({r: trace_of(r, *calls) for r, calls in enumerate(bodies)})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((CollectiveOp.ALL_GATHER, 8, -1), "rank 1 calls all_gather of 8 bytes"),
        ((CollectiveOp.ALL_REDUCE, 16, -1), "rank 1 calls all_reduce of 16 bytes"),
    ],
)
def test_members_that_disagree_are_both_quoted(other: Call, words: str) -> None:
    """A mismatch names both ranks, both calls and both call sites."""
    with pytest.raises(MismatchError) as caught:
        verify(pair([REDUCE_8, REDUCE_8], [REDUCE_8, other]))

    message = str(caught.value)
    assert "communication 1 of a group in the steps differs between members" in message
    assert "rank 0 calls all_reduce of 8 bytes in group 'world' of 2, train0.py:2" in message
    assert words in message
    assert "train1.py:2" in message


def test_different_roots_are_a_mismatch() -> None:
    """Broadcasts from different roots do not match."""
    one, other = ([(CollectiveOp.BROADCAST, 8, root)] for root in (0, 1))

    with pytest.raises(MismatchError, match="differs between members"):
        verify(pair(one, other))


def test_uneven_all_to_all_is_legal() -> None:
    """Members of an all_to_all may pass different numbers of bytes."""
    # Raises otherwise.
    verify(pair([(CollectiveOp.ALL_TO_ALL, 8, -1)], [(CollectiveOp.ALL_TO_ALL, 24, -1)]))


@pytest.mark.parametrize(
    ("prologue", "where"), [(False, "in the steps"), (True, "in the part before the steps")]
)
def test_member_that_never_calls_is_named(prologue: bool, where: str) -> None:
    """A collective that one member never makes is told from one that it makes too rarely."""
    with pytest.raises(MismatchError, match=f"{where}, but rank 1, .*, never does"):
        verify(pair([REDUCE_8], [], prologue=prologue))


@pytest.mark.parametrize("prologue", [False, True])
def test_before_the_steps_files_of_other_ranks_may_be_the_cause(prologue: bool) -> None:
    """Which a program loads as it starts."""
    with pytest.raises(MismatchError) as caught:
        verify(pair([REDUCE_8], [], prologue=prologue))
    assert ("have just saved" in str(caught.value)) == prologue


def test_member_that_calls_too_rarely_is_named() -> None:
    """The surplus call is quoted, with how many the other member makes."""
    with pytest.raises(MismatchError, match=r"train0.py:2 .*, but rank 1, .* makes only 1 such"):
        verify(pair([REDUCE_8, REDUCE_8], [REDUCE_8]))


def test_prologue_cannot_pay_for_the_body() -> None:
    """Calls must match before the steps and within them separately, because steps repeat."""
    both = [trace_of(0, [REDUCE_8], []), trace_of(1, [], [REDUCE_8])]

    with pytest.raises(MismatchError, match="never does"):
        verify(job_from_traces(dict(enumerate(both))))


@pytest.mark.parametrize(
    ("receives", "words"),
    [
        ([], "never does"),
        ([(CollectiveOp.RECV, 4, 1)], "send of 8 bytes .* recv of 4 bytes"),
    ],
)
def test_every_send_needs_its_receive(receives: list[Call], words: str) -> None:
    """A send without a receive, or with one of another size, is refused."""
    with pytest.raises(MismatchError, match=words):
        verify(pair([(CollectiveOp.SEND, 8, 1)], receives))


def test_message_to_oneself_is_refused() -> None:
    """A peer equal to the rank itself is an illegal graph, not a deadlock."""
    with pytest.raises(GraphError, match="is sent to itself"):
        verify(pair([(CollectiveOp.SEND, 8, 0)], []))


def test_every_rank_of_the_message_exists() -> None:
    """The rank in a message is a member of the class that is wrong, not its captured stand-in."""
    traces = pipeline_traces(2, 2, 1, 1)
    short = pipeline_traces(2, 2, 1, 2)
    graph = job_from_traces({0: traces[0], 2: short[2]})

    with pytest.raises(MismatchError, match=r"rank 2 calls .*, but rank 0"):
        verify(graph)
