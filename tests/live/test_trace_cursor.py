"""Which node of its trace a live rank is at."""

from __future__ import annotations

import pytest

from prismscale.emulation.hook import Collective, GroupHandle
from prismscale.errors import MismatchError
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import RankTrace
from prismscale.live.trace_cursor import TraceCursor
from support.traces import loop_trace

ALL = GroupHandle(group_index=0, ranks=(0, 1), group_rank=0, name="world", backend="nccl")
REDUCE, BARRIER = CollectiveOp.ALL_REDUCE, CollectiveOp.BARRIER
EXCHANGE = CollectiveOp.ALL_TO_ALL


@pytest.fixture
def trace() -> RankTrace:
    """A barrier, then two all-reduces a step."""
    return loop_trace(2, 0, prologue=[(BARRIER, 0, 0)], body=[(REDUCE, 8, 0), (REDUCE, 16, 0)])


def call(op: CollectiveOp, n_bytes: int) -> Collective:
    """A communication of the world."""
    return Collective(op=op, group=ALL, inputs=(), outputs=(), n_bytes=n_bytes)


def test_positions_go_on_from_step_to_step(trace: RankTrace) -> None:
    """Every communication of three steps, in program order."""
    cursor = TraceCursor(trace)
    calls = [call(BARRIER, 0), *[call(REDUCE, 8), call(REDUCE, 16)] * 3]
    positions = [cursor.next_position(c) for c in calls]
    stream = range(trace.n_prologue + 3 * trace.n_body)
    assert positions == [p for p in stream if trace.kind_N[trace.template(p)] != NodeKind.COMPUTE]


def test_other_calls_between_steps_are_uncovered(trace: RankTrace) -> None:
    """Counted, and the step that follows is found again."""
    cursor = TraceCursor(trace)
    cursor.next_position(call(BARRIER, 0))
    assert cursor.next_position(call(BARRIER, 0)) is None
    assert cursor.next_position(call(REDUCE, 8)) == trace.n_prologue
    assert cursor.uncovered == 1


@pytest.mark.parametrize("other", [call(REDUCE, 8), call(BARRIER, 0)])
def test_other_calls_inside_a_step_are_an_error(trace: RankTrace, other: Collective) -> None:
    """The program does not repeat itself; both calls are named."""
    cursor = TraceCursor(trace)
    for expected in (call(BARRIER, 0), call(REDUCE, 8)):
        cursor.next_position(expected)
    with pytest.raises(MismatchError, match=r"captured it called all_reduce of 16 .* train\.py:7"):
        cursor.next_position(other)


def test_bytes_of_an_exchange_may_differ() -> None:
    """The routing of a mixture of experts changes from step to step."""
    cursor = TraceCursor(loop_trace(2, 0, body=[(EXCHANGE, 8, 0)]))
    assert cursor.next_position(call(EXCHANGE, 4_096)) is not None
