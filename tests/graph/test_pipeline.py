"""Where ranks sit in a pipeline, read off their messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prismscale.graph.builder import TraceBuilder
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.graph.pipeline import (
    message_groups,
    pipeline_groups,
    pipeline_places,
    stage_of,
)
from prismscale.graph.trace import GroupRecord
from support.jobs import PIPE, job_from_traces, pipeline_job, pipeline_traces


def stages(graph: JobGraph) -> list[int | None]:
    """Of every class."""
    return [stage_of(c) for c in graph.classes]


def test_a_stage_is_the_position_in_the_group_of_the_messages() -> None:
    """For a class, and for each of its ranks; replicas are named for their smallest rank."""
    graph = pipeline_job(3, 2, 1, 2)
    stage_R, replica_R = pipeline_places(graph)
    assert stages(graph) == [0, 1, 2]
    assert stage_R.tolist() == [0, 0, 1, 1, 2, 2]
    assert replica_R.tolist() == [0, 1, 0, 1, 0, 1]
    assert message_groups(graph.classes[1].trace) == [PIPE]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("cp", "pp"), [2]),
        (("CONTEXT_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"), [2]),
        (("mesh_cp", ""), [2]),
        (("", "mesh_pp"), [2]),
        (("", ""), [1, 2]),
        (("cp", "cp"), []),
    ],
)
def test_ranks_that_pass_keys_and_values_around_are_no_stages(
    names: tuple[str, str], expected: list[int]
) -> None:
    """A group that is named for a pipeline counts; else, whatever is not named for a context."""
    groups = [
        GroupRecord(ranks=(0, 1, 2, 3), name="world"),
        GroupRecord(ranks=(0, 1), name=names[0]),
        GroupRecord(ranks=(0, 2), name=names[1]),
    ]
    builder = TraceBuilder(rank=0, world_size=4, groups=groups)
    for group_index in (1, 2):
        builder.add_communication(CollectiveOp.SEND, 8, group_index=group_index, peer=1)
    assert pipeline_groups(builder.build(known_groups=groups)) == expected


def test_without_messages_there_is_no_stage() -> None:
    """Every rank is a replica of its own."""
    graph = pipeline_job(1, 2, 2, 2)
    stage_R, replica_R = pipeline_places(graph)
    assert set(stages(graph)) == {None}
    assert stage_R.tolist() == [0] * 4
    assert replica_R.tolist() == [0, 1, 2, 3]


def test_messages_among_all_ranks_are_those_of_the_smallest_group_of_both() -> None:
    """As DeepSpeed passes them: to a global rank, although the pipeline has groups."""
    traces = pipeline_traces(3, 2, 1, 2)
    world_size = traces[0].world_size
    for rank, trace in traces.items():
        group = trace.groups[PIPE].ranks
        message_N = trace.is_message_N
        own = group.index(rank)
        other_N = np.array(group)[(own + trace.peer_N[message_N]) % len(group)]
        peer_N, group_index_N = trace.peer_N.copy(), trace.group_index_N.copy()
        peer_N[message_N] = (other_N - rank) % world_size
        group_index_N[message_N] = 0
        traces[rank] = replace(trace, peer_N=peer_N, group_index_N=group_index_N)
    graph = job_from_traces(traces)

    assert sorted(set(stages(graph))) == [0, 1, 2]
    assert pipeline_places(graph)[0].tolist() == [0, 0, 1, 1, 2, 2]
