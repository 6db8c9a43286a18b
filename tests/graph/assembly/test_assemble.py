"""From captured traces to rank classes, group families and slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from prismscale.errors import GraphError
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import collect_groups
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace
from prismscale.sim.timeline import simulate
from support.jobs import RecordedDurations, job_from_traces, pipeline_job, pipeline_traces
from support.oracle import expand
from support.strategies import Job, jobs


def test_one_class_per_pipeline_stage() -> None:
    """Ranks of one stage share a class; stages differ by their position in the pipeline."""
    graph = pipeline_job(4, 2, 2, 2)

    assert [c.members_M.tolist() for c in graph.classes] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]


def test_stages_of_one_trace_are_split_by_position() -> None:
    """Middle stages that run the very same trace still get a class each: lockstep along a pipeline
    would deadlock."""
    traces = pipeline_traces(4, 1, 1, 4)
    graph = job_from_traces(traces, {0: 0, 1: 1, 2: 1, 3: 3})

    assert len(graph.classes) == 4
    assert graph.classes[1].trace is graph.classes[2].trace


def test_coverage_counts_what_was_assumed() -> None:
    """Each class says which of its ranks were captured and how many are taken on trust."""
    coverage = pipeline_job(2, 2, 2, 1).coverage

    assert [(c.captured, c.assumed) for c in coverage] == [((0,), 3), ((4,), 3)]


@given(jobs())
@settings(max_examples=80, deadline=None)
def test_every_rank_has_one_place(job: Job) -> None:
    """Classes partition the ranks, and each slot leads to the group and position of the member."""
    graph = job.graph

    assert np.sort(np.concatenate([c.members_M for c in graph.classes])).tolist() == list(
        range(graph.world_size)
    )
    for rank_class in graph.classes:
        for slot in rank_class.slots:
            ranks_KG = graph.families[slot.family].ranks_KG
            assert ranks_KG.ravel()[slot.slot_M].tolist() == rank_class.members_M.tolist()
            assert (slot.slot_M % ranks_KG.shape[1]).tolist() == slot.group_M.tolist()


def ring(world_size: int) -> tuple[dict[int, RankTrace], list[GroupRecord]]:
    """Every rank shares one group with the rank before it and one with the rank after it."""
    ranks = [(r, (r + 1) % world_size) for r in range(world_size)]
    records = [GroupRecord(ranks=tuple(range(world_size))), *(GroupRecord(ranks=r) for r in ranks)]
    own = [g for g in records if 0 in g.ranks]
    builder = TraceBuilder(rank=0, world_size=world_size, groups=own)
    builder.begin_body()
    last = builder.add_compute(10)
    calls = [
        builder.add_communication(CollectiveOp.ALL_REDUCE, 8, group_index=k, preds=[last])
        for k in (1, 2)
    ]
    builder.add_compute(1, preds=calls)
    return {0: builder.build(known_groups=records)}, records


def test_overlapping_groups_lead_back_to_their_members() -> None:
    """Where groups overlap like links of a chain, a group is the first of one member and the
    second of another; each rank must still find its own two."""
    traces, records = ring(6)
    graph = job_from_traces(traces)

    found = {rank: program.groups for rank, program in expand(graph).items()}

    assert found == {r: [g.ranks for g in records if r in g.ranks] for r in range(6)}
    assert simulate(graph, RecordedDurations(graph), steps=1).step_ns == 11


def build(alone: tuple[int, ...] = ()) -> JobGraph:
    """A [4, 2] data × tensor job in which some ranks stand alone."""
    traces = pipeline_traces(1, 4, 2, 1)
    everybody_as_0 = np.zeros(8, dtype=np.int64)
    groups = collect_groups(traces, 8, everybody_as_0)
    return assemble(traces, everybody_as_0, groups, alone=alone)


def test_rank_alone_has_its_own_class() -> None:
    """A live rank gets a class of its own; others split only where they share a group with it."""
    members = [c.members_M.tolist() for c in build(alone=(2,)).classes]

    assert sorted(members) == [[0, 4, 6], [1, 5, 7], [2], [3]]


def test_rank_alone_does_not_change_times() -> None:
    """Splitting classes changes who is computed together, not when anything ends."""
    together, split = build(), build(alone=(2,))

    assert len(together.classes) == 1
    assert (
        simulate(together, RecordedDurations(together)).step_end_ns_TDR.tolist()
        == simulate(split, RecordedDurations(split)).step_end_ns_TDR.tolist()
    )


def test_representative_that_was_not_captured_is_refused() -> None:
    """A rank cannot stand for others without a trace."""
    traces = pipeline_traces(1, 2, 1, 1)
    groups = collect_groups(traces, 2, np.zeros(2, dtype=np.int64))

    with pytest.raises(GraphError, match=r"ranks \[1\] represent others but were not captured"):
        assemble(traces, np.array([0, 1]), groups)
