"""Where ranks sit in a pipeline, read off their messages."""

from __future__ import annotations

from prismscale.graph.job_graph import JobGraph
from prismscale.graph.pipeline import message_groups, pipeline_places, stage_of
from support.jobs import PIPE, pipeline_job


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


def test_without_messages_there_is_no_stage() -> None:
    """Every rank is a replica of its own."""
    graph = pipeline_job(1, 2, 2, 2)
    stage_R, replica_R = pipeline_places(graph)
    assert set(stages(graph)) == {None}
    assert stage_R.tolist() == [0] * 4
    assert replica_R.tolist() == [0, 1, 2, 3]
