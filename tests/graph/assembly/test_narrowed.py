"""Messages in larger groups than they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.diagnosis.expanded import DEFAULT_GROUP, expanded_record
from prismscale.diagnosis.standstill import ClassStanding
from prismscale.errors import FormatError
from prismscale.formats.perfetto import describe_rank
from prismscale.graph import trace_columns
from prismscale.graph.assembly.narrowed import as_sent
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.io import load_graph, save_graph
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace
from prismscale.graph.verify import verify
from prismscale.sim.timeline import simulate
from support.jobs import PIPE, RecordedDurations, job_from_traces, pipeline_traces


def sent_in_the_world(traces: Mapping[int, RankTrace]) -> dict[int, RankTrace]:
    """The same messages, in the group of all ranks."""
    return {rank: _in_the_world(trace) for rank, trace in traces.items()}


def _in_the_world(trace: RankTrace) -> RankTrace:
    pipeline, world = trace.groups[PIPE].ranks, trace.world_size
    group_index_N, peer_N = trace.group_index_N.copy(), trace.peer_N.copy()
    for node in np.flatnonzero(trace.is_message_N).tolist():
        at = pipeline.index(trace.rank) + int(trace.peer_N[node])
        group_index_N[node] = 0
        peer_N[node] = (pipeline[at % len(pipeline)] - trace.rank) % world
    return replace(trace, group_index_N=group_index_N, peer_N=peer_N)


def ends_ns(graph: JobGraph) -> list[list[list[int]]]:
    """When each step of each rank ends, of three."""
    ends: list[list[list[int]]] = simulate(graph, RecordedDurations(graph)).step_end_ns_TDR.tolist()
    return ends


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 2), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_a_pipeline_in_the_group_of_all_ranks_is_a_pipeline(
    pp: int, dp: int, tp: int, microbatches: int
) -> None:
    """It has the classes and the times that it has in a group of its own."""
    traces = pipeline_traces(pp, dp, tp, microbatches)
    own, wide = job_from_traces(traces), job_from_traces(sent_in_the_world(traces))

    assert [c.members_M.tolist() for c in wide.classes] == [
        c.members_M.tolist() for c in own.classes
    ]
    assert ends_ns(wide) == ends_ns(own)


def test_what_was_sent_in_the_group_of_all_ranks_is_known() -> None:
    """Records of real ranks have it so."""
    traces = sent_in_the_world(pipeline_traces(4, 2, 1, 3))
    for rank_class in job_from_traces(traces).classes:
        sent = traces[rank_class.trace.rank]
        group_index_N, peer_N = as_sent(rank_class.trace)
        assert group_index_N.tolist() == sent.group_index_N.tolist()
        assert peer_N.tolist() == sent.peer_N.tolist()


def test_messages_that_fit_no_smaller_group_stay() -> None:
    """A ring of all ranks is one."""
    traces = sent_in_the_world(pipeline_traces(4, 1, 1, 3))
    graph = job_from_traces(traces)

    assert all(g.within is None for c in graph.classes for g in c.trace.groups)


def test_a_rank_has_one_place_on_each_axis() -> None:
    """Groups for messages alone are no axes."""
    own = job_from_traces(pipeline_traces(2, 2, 2, 2))
    wide = job_from_traces(sent_in_the_world(pipeline_traces(2, 2, 2, 2)))

    assert describe_rank(wide, 5) == describe_rank(own, 5) == "rank 5 (tp 1, dp 0, pp 1)"


def test_a_flight_record_has_the_programs_groups() -> None:
    """Those that are there for messages alone were created by nobody."""
    graph = job_from_traces(sent_in_the_world(pipeline_traces(2, 2, 2, 2)))
    standings = [_done(c.trace) for c in graph.classes]
    calls = expanded_record(graph, standings).ranks[3]

    assert len(calls.groups) == 4
    messages = calls.columns.peer_N >= 0
    assert {calls.groups[g].description for g in calls.columns.group_N[messages]} == {DEFAULT_GROUP}


def _done(trace: RankTrace) -> ClassStanding:
    nodes = np.flatnonzero(trace.communicates_N)
    return ClassStanding(node_C=nodes, state_C=np.zeros(len(nodes), dtype=np.uint8))


def test_a_file_remembers_where_messages_were_sent(tmp_path: Path) -> None:
    """Written and read."""
    graph = job_from_traces(sent_in_the_world(pipeline_traces(2, 2, 2, 2)))
    save_graph(graph, tmp_path)

    for read, rank_class in zip(load_graph(tmp_path).classes, graph.classes, strict=True):
        assert read.trace.groups == rank_class.trace.groups


def test_a_file_cannot_name_a_group_that_does_not_hold_the_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused when it is read."""
    graph = job_from_traces(sent_in_the_world(pipeline_traces(2, 2, 2, 2)))
    header = trace_columns.StoredGroups.header

    def damaged(self: trace_columns.StoredGroups) -> dict[str, object]:
        found = header(self)
        return {**found, "within": [[n, 1] for n, _ in found["within"]]}

    monkeypatch.setattr(trace_columns.StoredGroups, "header", damaged)
    save_graph(graph, tmp_path)
    with pytest.raises(FormatError, match="no part of those"):
        load_graph(tmp_path)


def test_a_smaller_group_with_others_in_it_takes_no_messages() -> None:
    """Its other members may not be in the group in which the messages are sent."""
    wide, other = (0, 1, 2, 3), (0, 1, 4)
    known = [GroupRecord(ranks=ranks) for ranks in (tuple(range(5)), wide, other)]
    traces = {}
    for rank in range(5):
        own = [g for g in known if rank in g.ranks]
        builder = TraceBuilder(rank=rank, world_size=5, groups=own)
        builder.begin_body()
        last = builder.add_compute(1)
        if rank < 2:
            op = (CollectiveOp.SEND, CollectiveOp.RECV)[rank]
            builder.add_communication(op, 8, group_index=1, peer=1 - 2 * rank, preds=[last])
        traces[rank] = builder.build(known_groups=known)
    graph = job_from_traces(traces)

    assert all(g.within is None for c in graph.classes for g in c.trace.groups)


def test_a_ring_over_all_ranks_stays_in_their_group() -> None:
    """Every second neighbour is in another pair."""
    world = GroupRecord(ranks=(0, 1, 2, 3), name="world", backend="gloo")
    pairs = [GroupRecord(ranks=ranks, name="pair", backend="gloo") for ranks in ((0, 1), (2, 3))]
    builder = TraceBuilder(rank=0, world_size=4, groups=(world, pairs[0]))
    begun = builder.add_compute(10, preds=[-1])
    sent = builder.add_communication(CollectiveOp.SEND, 8, peer=1, preds=[begun])
    got = builder.add_communication(CollectiveOp.RECV, 8, peer=-1, preds=[begun])
    builder.add_compute(1, preds=[sent, got])
    trace = builder.build(known_groups=(world, *pairs))

    graph = job_from_traces({0: trace})

    verify(graph)
    assert {r.ranks for r in graph.classes[0].trace.groups} == {(0, 1, 2, 3), (0, 1)}
    assert simulate(graph, RecordedDurations(graph), steps=2).job_step_ns_TD[-1, 0] == 11
