"""Chakra execution traces: what is written comes back as the same job, bad files are refused."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.durations.samples import StepSamples
from prismscale.errors import FormatError, UsageError
from prismscale.formats.chakra import read_chakra, write_chakra
from prismscale.formats.chakra.protobuf import (
    CommType,
    GlobalMetadata,
    Node,
    NodeType,
    attribute,
    attributes,
    read_messages,
    write_message,
)
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord
from prismscale.sim.timeline import simulate
from support.jobs import RecordedDurations, job_from_traces, pipeline_job
from support.strategies import Job, durations, jobs


def written(path: Path, nodes: list[Any]) -> Path:
    with path.open("wb") as file:
        write_message(file, GlobalMetadata(version="0.0.4"))
        for node in nodes:
            write_message(file, node)
    return path


def all_reduce(id: int, micros: int, **attrs: Any) -> Any:
    told = {"comm_type": int(CommType.ALL_REDUCE), "comm_size": 64} | attrs
    made = [attribute(k, v) for k, v in told.items()]
    return Node(id=id, name="ar", type=NodeType.COMM_COLL_NODE, duration_micros=micros, attr=made)


def compute(id: int, micros: int, deps: tuple[int, ...] = ()) -> Any:
    return Node(id=id, name="c", type=NodeType.COMP_NODE, duration_micros=micros, data_deps=deps)


@given(jobs(max_ranks=8), st.data())
@settings(max_examples=60, deadline=None)
def test_job_comes_back_as_it_was(job: Job, data: st.DataObject) -> None:
    """Every rank ends every step at the same nanosecond after a round trip."""
    table = data.draw(durations(job.graph))
    before = simulate(job.graph, table, steps=3, ranks=range(job.graph.world_size))
    with tempfile.TemporaryDirectory() as folder:
        graph = read_chakra(write_chakra(job.graph, before, table, Path(folder)))
    after = simulate(graph, StepSamples.from_graph(graph).durations(0), steps=3)
    assert np.array_equal(before.step_end_ns_TDR, after.step_end_ns_TDR)


def test_chosen_rank_carries_start_times_and_groups(tmp_path: Path) -> None:
    """A file holds one rank's last step with times, and the groups stand beside it."""
    graph = pipeline_job(2, 2, 2, 2)
    recorded = RecordedDurations(graph)
    timeline = simulate(graph, recorded, steps=2, ranks=[5])
    (path,) = write_chakra(graph, timeline, recorded, tmp_path)
    with path.open("rb") as file:
        metadata, *nodes = read_messages(path.name, file)
    assert attributes(metadata)["rank"] == 5
    starts = [attributes(n)["start_time_ns"] for n in nodes]
    assert starts == timeline.ranks[5].start_ns_N[-len(nodes) :].tolist()
    groups = json.loads((tmp_path / "comm_group.json").read_text())
    assert [4, 5] in groups.values()


def test_timeline_without_ranks_is_refused(tmp_path: Path) -> None:
    """There is nothing to write."""
    graph = pipeline_job(1, 2, 1, 1)
    recorded = RecordedDurations(graph)
    with pytest.raises(UsageError, match="ranks="):
        write_chakra(graph, simulate(graph, recorded), recorded, tmp_path)


def test_foreign_collective_lasts_as_the_quickest_member_saw(tmp_path: Path) -> None:
    """Without start times, the shortest record holds the least waiting."""
    paths = [
        written(tmp_path / f"x.{r}.et", [compute(1, 10 * r), all_reduce(2, micros), compute(3, 1)])
        for r, micros in ((0, 90), (1, 40))
    ]
    graph = read_chakra(paths)
    assert {int(c.trace.body_ns_SB[0, 1]) for c in graph.classes} == {40_000}


def test_nodes_are_put_in_order_of_their_dependencies(tmp_path: Path) -> None:
    """Files may list a node before what it depends on."""
    path = written(tmp_path / "x.0.et", [compute(9, 1, (4,)), compute(4, 2)])
    trace = read_chakra([path]).classes[0].trace
    assert trace.body_ns_SB.tolist() == [[2000, 1000]]


def test_groups_are_read_from_the_file_beside(tmp_path: Path) -> None:
    """comm_group.json gives groups their ranks."""
    (tmp_path / "comm_group.json").write_text('{"a": [0, 1], "b": [2]}')
    paths = [
        written(tmp_path / f"x.{r}.et", [all_reduce(1, 5, pg_name=name), compute(2, 1)])
        for r, name in enumerate("aab")
    ]
    graph = read_chakra(paths)
    assert {f.ranks_KG.shape for f in graph.families} == {(3, 1), (2, 1), (1, 1)}


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([compute(1, 1, (7,))], "depends on 7, which is not there"),
        ([compute(1, 1, (2,)), compute(2, 1, (1,))], "circle"),
        ([compute(1, 1), compute(1, 1)], "appears twice"),
        ([Node(id=1, name="?")], "has no type"),
        ([all_reduce(1, 1, pg_name="nobody")], "group 'nobody'"),
        ([all_reduce(1, 1, comm_type=77)], "comm_type 77"),
    ],
)
def test_illegal_nodes_are_refused(tmp_path: Path, nodes: list[Any], message: str) -> None:
    """The message names the file, the node and the reason."""
    with pytest.raises(FormatError, match=message):
        read_chakra([written(tmp_path / "x.0.et", nodes)])


@given(st.binary(max_size=60))
def test_foreign_bytes_never_crash_the_reader(content: bytes) -> None:
    """Whatever a file holds, reading ends in messages or in a FormatError."""
    with contextlib.suppress(FormatError):
        # Raises something else otherwise.
        list(read_messages("x", io.BytesIO(content)))


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    """A file that ends within a message is damaged."""
    path = written(tmp_path / "x.0.et", [compute(1, 1), compute(2, 1)])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match="truncated"):
        read_chakra([path])


def test_missing_rank_is_refused(tmp_path: Path) -> None:
    """Every rank from 0 on is needed."""
    path = written(tmp_path / "x.3.et", [compute(1, 1)])
    with pytest.raises(FormatError, match="every rank from 0 on"):
        read_chakra([path])


def test_ends_of_messages_are_of_32_bits() -> None:
    """Chakra's feeder takes those of 64 for 0."""
    for name in ("comm_src", "comm_dst", "comm_tag"):
        assert attribute(name, 3).int32_val == 3
    assert attribute("comm_size", 2**40).int64_val == 2**40


def test_messages_are_told_apart_by_their_tags(tmp_path: Path) -> None:
    """One rank sends first what the other takes last."""
    pair = GroupRecord(ranks=(0, 1), name="pair", backend="gloo")
    traces = {}
    for rank, op in enumerate((CollectiveOp.SEND, CollectiveOp.RECV)):
        builder = TraceBuilder(rank=rank, world_size=2, groups=(pair,))
        begun = builder.add_compute(1, preds=[-1])
        messages = [
            builder.add_communication(op, 100 * tag, peer=1, tag=tag, preds=[begun])
            for tag in ((1, 2) if rank == 0 else (2, 1))
        ]
        builder.add_compute(1, preds=messages)
        traces[rank] = builder.build(known_groups=(pair,))
    graph = job_from_traces(traces)
    table = RecordedDurations(graph)
    before = simulate(graph, table, steps=2, ranks=range(2))

    found = read_chakra(write_chakra(graph, before, table, tmp_path))

    for trace in (c.trace for c in found.classes):
        tag_N = (trace.peer_N // 2)[trace.is_message_N]
        assert (trace.bytes_N[trace.is_message_N] == 100 * tag_N).all()
        assert sorted(tag_N.tolist()) == [1, 2]


def test_a_barrier_is_a_barrier(tmp_path: Path) -> None:
    """And not one of symmetric memory, which is exported as the same."""
    path = written(tmp_path / "a.0.et", [all_reduce(1, 5, comm_type=int(CommType.BARRIER))])
    (rank_class,) = read_chakra([path]).classes
    assert CollectiveOp.BARRIER in rank_class.trace.op_N.tolist()
