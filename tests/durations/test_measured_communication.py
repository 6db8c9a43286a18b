"""What a communication takes: as it was really made, or no less than the links allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prismscale.cluster import Cluster
from prismscale.cost.collective import collective_model
from prismscale.durations.graph_durations import GraphDurations
from prismscale.graph.facts import CaptureFacts, CoRunFacts
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord
from support.jobs import job_from_traces
from support.traces import loop_trace

MODEL = collective_model(Cluster.load("loopback-gloo"))
TOOK_NS = 50
"""Of every communication of a :func:`loop_trace`: far less than the model says."""
WORLD, PAIR = 0, 1


def reduction_ns(co_measured_with: tuple[int, ...], group_index: int) -> int:
    """How long a rank of four, timed with others, is in an all-reduce of the world or its pair."""
    groups = [GroupRecord(ranks=(0, 1, 2, 3)), *(GroupRecord(ranks=(r, r + 1)) for r in (0, 2))]
    body = [(CollectiveOp.ALL_REDUCE, 1 << 20, group_index)]
    co_run = (
        CoRunFacts(issue_ns=0, common_jitter=0.0, ranks=co_measured_with)
        if co_measured_with
        else None
    )
    facts = CaptureFacts(has_own_share=True, co_run=co_run)
    traces = {
        rank: replace(loop_trace(4, 8, rank=rank, body=body, groups=groups), facts=facts)
        for rank in range(4)
    }
    graph = job_from_traces(traces, dict.fromkeys(range(4), 0))
    durations = GraphDurations(graph=graph, model=MODEL, sampled=True)
    trace = graph.classes[0].trace
    (node,) = trace.communications(trace.n_prologue, trace.n_nodes)
    return int(durations.body(0, 0)[node - trace.n_prologue])


def test_what_all_its_ranks_made_keeps_its_measurement() -> None:
    """Links as the target's were what was measured; lifting some to a model's mean, and lowering
    none, would make every step longer."""
    assert reduction_ns((0, 1), PAIR) == TOOK_NS


@pytest.mark.parametrize(
    ("co_measured_with", "group_index"), [((0, 1), WORLD), ((0,), PAIR), ((), PAIR)]
)
def test_what_one_rank_did_alone_takes_no_less_than_the_links_allow(
    co_measured_with: tuple[int, ...], group_index: int
) -> None:
    """Ranks of other slices, ranks on other nodes, and captures that were not timed in slices."""
    assert reduction_ns(co_measured_with, group_index) > 100 * TOOK_NS
