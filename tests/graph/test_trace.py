"""Traces: positions, edges across steps, fingerprints, and what the builder writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.errors import GraphError
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.node import CollectiveOp, NodeKind
from support.jobs import pipeline_traces
from support.traces import small_trace


def test_positions_count_prologue_and_body() -> None:
    """A trace knows how many nodes it has before and within a step, and how many samples."""
    trace = small_trace()

    assert (trace.n_nodes, trace.n_prologue, trace.n_body, trace.n_samples) == (5, 2, 3, 2)


@given(st.integers(0, 1_000))
def test_stream_repeats_the_body_for_ever(position: int) -> None:
    """Positions beyond the stored nodes lead back into the body."""
    node = small_trace().template(position)

    assert node == (position if position < 5 else 2 + (position - 2) % 3)


def test_edges_are_distances_back() -> None:
    """A negative position given to the builder is counted from the start of the stream."""
    trace = small_trace()

    assert trace.predecessors(2).tolist() == [1]
    assert trace.predecessors(3).tolist() == [1]
    assert trace.predecessors(4).tolist() == [1, 5]


def test_scalar_duration_serves_all_samples() -> None:
    """A node with one duration has it in every sampled step."""
    assert small_trace().body_ns_SB.tolist() == [[10, 0, 20], [11, 0, 22]]


def test_communications_are_listed_in_program_order() -> None:
    """Only nodes that synchronise with other ranks are listed."""
    trace = small_trace()

    assert list(trace.communications(0, 5)) == [1, 3]
    assert list(trace.communications(2, 5)) == [3]


def test_nodes_are_described_for_messages() -> None:
    """Operation, bytes, group and call site; a label for computation."""
    trace = small_trace()

    assert trace.describe(0) == "computation 'init'"
    assert trace.describe(1) == "barrier of 0 bytes in group 'world' of 4, train.py:3"
    assert trace.describe(3) == "all_reduce of 4,096 bytes in group of 2, train.py:9"


def test_call_site_may_be_unknown() -> None:
    """A node without a call site says so."""
    assert small_trace().site(0) == "unknown call site"


def test_peers_are_relative_and_wrap() -> None:
    """The previous stage is ``-1`` for the program and ``size - 1`` in the trace."""
    builder = TraceBuilder(rank=0, world_size=4)
    node = builder.add_communication(CollectiveOp.RECV, 8, peer=-1)
    builder.begin_body()

    trace = builder.build()

    assert trace.peer_N[node] == 3
    assert trace.kind_N[node] == NodeKind.RECV


def test_different_numbers_of_samples_are_refused() -> None:
    """Body nodes are sampled in the same steps."""
    builder = TraceBuilder(rank=0, world_size=1)
    builder.add_compute([1, 2])
    builder.add_compute([1, 2, 3])

    with pytest.raises(ValueError, match="different numbers of sampled durations"):
        builder.build()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"op_N": np.zeros(4, dtype=np.uint8)}, "columns differ in length from 5 nodes"),
        ({"pred_start_N1": np.zeros(5, dtype=np.int32)}, "predecessor table does not fit 5 nodes"),
        ({"n_prologue": 6}, "prologue of 6 in 5 nodes"),
        ({"body_ns_SB": np.zeros((1, 2), dtype=np.int64)}, "for 3 body nodes"),
    ],
)
def test_columns_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    """A trace whose columns contradict each other cannot be made."""
    with pytest.raises(GraphError, match=f"rank 1: .*{words}"):
        replace(small_trace(), **change)


def test_fingerprint_ignores_durations_sites_and_rank() -> None:
    """Ranks that do the same thing at other times and places may share a class."""
    trace = small_trace()
    other = replace(
        trace,
        rank=3,
        body_ns_SB=trace.body_ns_SB + 1,
        sites=("other.py:1", "other.py:2"),
        site_N=np.zeros(5, dtype=np.int32),
    )

    assert trace.fingerprint() == other.fingerprint()


@pytest.mark.parametrize(
    "column", ["kind_N", "op_N", "lane_N", "group_index_N", "peer_N", "bytes_N", "pred_distance_P"]
)
def test_fingerprint_covers_structure(column: str) -> None:
    """Any other operation, lane, group, peer, size or edge makes another class."""
    trace = small_trace()
    values = getattr(trace, column).copy()
    values[-1] += 1

    assert trace.fingerprint() != replace(trace, **{column: values}).fingerprint()


def test_fingerprints_of_mirrored_stages_agree() -> None:
    """Two middle stages of a pipeline with equal schedules run the same trace."""
    traces = pipeline_traces(6, 1, 1, 1)

    assert traces[2].fingerprint() == traces[3].fingerprint()
    assert traces[0].fingerprint() != traces[5].fingerprint()
