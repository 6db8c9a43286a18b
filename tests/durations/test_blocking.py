"""Communications in the way of computation: edges that a trace lacks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.durations.what_if.blocking import blocking
from prismscale.durations.what_if.meant_groups import is_meant, meant_nodes
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.launch_paths import LAUNCH_SUFFIX
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace
from prismscale.sim.timeline import simulate
from support.jobs import RecordedDurations, job_from_traces

WORLD = GroupRecord(ranks=(0, 1), name="world")
DATA = GroupRecord(ranks=(0, 1), name="mesh_dp")
GROUPS = (WORLD, DATA)


def program(rank: int = 0) -> TraceBuilder:
    """A program of two ranks, in its first steady step."""
    builder = TraceBuilder(rank=rank, world_size=2, groups=GROUPS)
    builder.begin_body()
    return builder


def gather(builder: TraceBuilder, ns: int, *preds: int, group_index: int = 1) -> int:
    """An all-gather of ``ns``."""
    return builder.add_communication(
        CollectiveOp.ALL_GATHER,
        64,
        group_index=group_index,
        preds=preds,
        durations_ns=ns,
        lane="mesh_dp",
    )


def step_ns(trace: RankTrace) -> int:
    """Steady step of two ranks that do the same."""
    graph = job_from_traces({0: trace}, {0: 0, 1: 0})
    return simulate(graph, RecordedDurations(graph), steps=6).step_ns


def blocked(builder: TraceBuilder, group: str = "dp") -> tuple[RankTrace, int]:
    """The program with that group's communications in the way, and how many were not so before."""
    trace = builder.build()
    found, touched_N = blocking(trace, meant_nodes(trace, group))
    return found, int(touched_N.sum())


def test_a_prefetch_comes_after_what_was_issued_before_it() -> None:
    """100 ns beside 300, and then alone."""
    builder = program()
    first = builder.add_compute(300, preds=[-1], lane="stream 0")
    gathered = gather(builder, 100)
    builder.add_compute(50, preds=[first, gathered], lane="stream 0")
    assert step_ns(builder.build()) == 350
    after, touched = blocked(builder)
    assert (step_ns(after), touched) == (450, 1)


def test_what_is_computed_meanwhile_comes_after_it() -> None:
    """A gradient that is reduced while the backward pass goes on."""
    builder = program()
    first = builder.add_compute(300, preds=[-1], lane="stream 0")
    reduced = gather(builder, 100, first)
    second = builder.add_compute(200, preds=[first], lane="stream 0")
    builder.add_compute(50, preds=[second, reduced], lane="stream 0")
    assert step_ns(builder.build()) == 550
    after, touched = blocked(builder)
    assert (step_ns(after), touched) == (650, 1)


def test_what_blocks_already_is_not_touched() -> None:
    """It is waited for at once, and begins after what came before: nothing is added."""
    builder = program()
    first = builder.add_compute(300, preds=[-1], lane="stream 0")
    gathered = gather(builder, 100, first)
    builder.add_compute(50, preds=[gathered], lane="stream 0")
    after, touched = blocked(builder)
    assert touched == 0
    assert np.array_equal(after.pred_distance_P, builder.build().pred_distance_P)


def test_an_order_that_follows_from_others_needs_no_edge() -> None:
    """Over the host, which waited for the stream."""
    builder = program()
    first = builder.add_compute(300, preds=[-1], lane="stream 0")
    host = builder.add_compute(10, preds=[first])
    gathered = gather(builder, 100, host)
    builder.add_compute(50, preds=[gathered], lane="stream 0")
    assert blocked(builder)[1] == 0


def test_other_groups_stay_as_they_are() -> None:
    """Only the group that is named."""
    builder = program()
    first = builder.add_compute(300, preds=[-1], lane="stream 0")
    gathered = gather(builder, 100, group_index=0)
    builder.add_compute(50, preds=[first, gathered], lane="stream 0")
    after, touched = blocked(builder)
    assert (step_ns(after), touched) == (350, 0)


def test_the_way_over_the_host_does_not_wait() -> None:
    """A launch path counts from the host, which issues ahead of the stream."""
    builder = program()
    host = builder.add_compute(10, preds=[-1])
    first = builder.add_compute(300, preds=[-3], lane="stream 0", label="forward")
    gathered = gather(builder, 100, host)
    work = builder.add_compute(50, preds=[first], lane="stream 0", label="forward")
    launch = builder.add_compute(60, preds=[host], lane="stream 0", label=f"forward{LAUNCH_SUFFIX}")
    builder.add_compute(0, preds=[work, launch], lane="stream 0", label="forward")
    after, _ = blocked(builder)
    found = {node: [node - d for d in after.predecessors(node).tolist()] for node in (work, launch)}
    assert gathered in found[work]
    assert found[launch] == [host]


def test_a_batch_that_is_issued_at_once_stays_side_by_side() -> None:
    """Its members do not wait for each other; the next batch does."""
    builder = program()
    first = builder.add_compute(300, preds=[-1], lane="stream 0")
    pair = [gather(builder, 100), gather(builder, 100)]
    third = gather(builder, 100, pair[0])
    builder.add_compute(50, preds=[first], lane="stream 0")
    after, touched = blocked(builder)
    assert (step_ns(after), touched) == (550, 3)
    assert third - pair[1] in after.predecessors(third).tolist()


def test_edges_cross_the_border_of_a_step() -> None:
    """What a step issues last is in the way of the next one's first computation."""
    builder = program()
    first = builder.add_compute(300, preds=[-2], lane="stream 0")
    gather(builder, 100, first)
    assert step_ns(builder.build()) == 300
    after, touched = blocked(builder)
    assert (step_ns(after), touched) == (400, 1)


def test_a_processor_computes_where_there_is_no_stream() -> None:
    """gloo beside a backward pass."""
    builder = program()
    first = builder.add_compute(300, preds=[-1])
    reduced = gather(builder, 100, first)
    second = builder.add_compute(200, preds=[first])
    builder.add_compute(50, preds=[second, reduced])
    assert step_ns(blocked(builder)[0]) == 650


COMPUTES, GATHERS = "computes", "gathers"
DEED = st.tuples(
    st.sampled_from([COMPUTES, COMPUTES, GATHERS]), st.integers(0, 50), st.integers(1, 4)
)


@given(st.lists(DEED, min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_nothing_overlaps_with_what_blocks(deeds: list[tuple[str, int, int]]) -> None:
    """On random programs of one stream, whose prefetches are awaited any number of spans later: the
    step is the sum of all that was done, and never shorter than before."""
    builder = program()
    awaited: dict[int, list[int]] = {}
    last = builder.add_compute(1, preds=[-1], lane="stream 0")
    for n, (deed, ns, later) in enumerate(deeds):
        if deed == GATHERS:
            # Told apart by their predecessors, or they would be one batch.
            awaited.setdefault(n + later, []).append(gather(builder, ns, last))
            last = builder.add_compute(0, preds=[last], lane="stream 0")
        else:
            due = [c for at, cs in awaited.items() if at <= n for c in cs]
            last = builder.add_compute(ns, preds=[last, *due], lane="stream 0")
    builder.add_compute(1, preds=[last, *(c for cs in awaited.values() for c in cs)])
    builder.add_compute(1, preds=[len(builder) - 1, last], lane="stream 0")
    before = builder.build()
    after, _ = blocking(before, meant_nodes(before, "dp"))
    assert step_ns(after) >= step_ns(before)
    gathered = sum(ns for deed, ns, _ in deeds if deed == GATHERS)
    computed = sum(ns for deed, ns, _ in deeds if deed == COMPUTES)
    # The host's node of 1 ns runs beside the next step's first one.
    assert gathered + computed + 2 <= step_ns(after) <= gathered + computed + 3


@pytest.mark.parametrize("given", ["mesh_dp", "dp", "mesh_.*", ".*_dp"])
def test_a_group_is_meant_by_its_name_or_a_pattern(given: str) -> None:
    """With or without the mesh's prefix."""
    assert is_meant(given, "mesh_dp")


@pytest.mark.parametrize("given", ["d", "mesh", "dp_shard", "(", "mesh_tp"])
def test_a_part_of_a_name_is_none(given: str) -> None:
    """Nor is what is no pattern."""
    assert not is_meant(given, "mesh_dp")
