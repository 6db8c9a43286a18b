"""Groups that communicate at the same time share the links of a whole job."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prismscale.cluster import Cluster
from prismscale.durations.altered import Alteration
from prismscale.durations.scenario import Scenario
from prismscale.errors import UsageError
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.sim.hoped import HopedJob, hoped_job
from prismscale.sim.retime import retime
from support.jobs import job_from_traces, mesh_groups

H100 = Cluster.load("h100-sxm")
MIB = 2**20
MESH = np.arange(32).reshape(2, 2, 8)
"""Replicas, shards and the ranks of a node: every group of the first two spans nodes."""
REPLICAS, SHARDS, NODE = 1, 2, 3


def job(*, apart: bool = False, groups: tuple[int, int] = (REPLICAS, SHARDS)) -> JobGraph:
    """Two communications of a step, at the same time or one after the other; then computation."""
    records = mesh_groups(MESH, {"replicas": 0, "shards": 1, "node": 2})
    own = [r for r in records if 0 in r.ranks]
    builder = TraceBuilder(rank=0, world_size=MESH.size, groups=own)
    first = builder.add_compute(1_000, preds=[-1])
    one = builder.add_communication(
        CollectiveOp.ALL_REDUCE, 256 * MIB, group_index=groups[0], preds=[first], lane="one"
    )
    other = builder.add_communication(
        CollectiveOp.ALL_REDUCE,
        256 * MIB,
        group_index=groups[1],
        preds=[one if apart else first],
        lane="other",
    )
    builder.add_compute(1_000, preds=[one, other])
    return job_from_traces({0: builder.build(known_groups=records)})


def hoped(graph: JobGraph, *what_ifs: str) -> HopedJob:
    given = Scenario(cluster=H100, what_ifs=what_ifs)
    return hoped_job(graph, Alteration(scenario=given, root=Path()))


def step_ns(found: HopedJob) -> int:
    return retime(found.durations).step_ns


def test_two_groups_on_the_network_at_a_time_take_about_as_long_as_one_after_the_other() -> None:
    """Each has half of the cards; what is not bandwidth overlaps still."""
    alone, shared = step_ns(hoped(job())), step_ns(hoped(job(), "links=shared"))
    apart = step_ns(hoped(job(apart=True)))
    assert alone < 0.6 * apart
    assert 0.85 * apart < shared <= apart


def test_what_it_touches_is_told() -> None:
    """Both communications, and what they take."""
    (effect,) = hoped(job(), "links=shared").effects
    assert effect.count == 2
    assert "replicas 1, shards 1 communications a step" in effect.touches


def test_groups_on_different_links_do_not_share() -> None:
    """One inside a node, one between nodes; and one after the other on one link."""
    for graph in (job(groups=(NODE, SHARDS)), job(apart=True)):
        with pytest.raises(UsageError, match="at the same time"):
            hoped(graph, "links=shared")


def test_a_faster_network_is_shared_as_it_would_be() -> None:
    """Together with a what-if on the link: about half of what sharing took."""
    shared = step_ns(hoped(job(), "links=shared"))
    faster = step_ns(hoped(job(), "links=shared", "link=network x2"))
    assert 0.45 * shared < faster < 0.65 * shared


def test_what_runs_into_the_next_step_shares_with_it() -> None:
    """Issued last in a step, and the other first in the next one: as if in one step."""
    records = mesh_groups(MESH, {"replicas": 0, "shards": 1, "node": 2})
    own = [r for r in records if 0 in r.ranks]
    builder = TraceBuilder(rank=0, world_size=MESH.size, groups=own)
    first = builder.add_compute(1_000, preds=[-1])
    for lane, group_index in (("one", REPLICAS), ("other", SHARDS)):
        begun = -1 if lane == "one" else first
        builder.add_communication(
            CollectiveOp.ALL_REDUCE, 256 * MIB, group_index=group_index, preds=[begun], lane=lane
        )
    # The first computation of the next step waits for what was issued first in this one.
    builder.add_compute(1_000, preds=[first + 1])
    graph = job_from_traces({0: builder.build(known_groups=records)})

    extra_B = hoped(graph, "links=shared").durations.shared_ns[0]

    assert (extra_B[[1, 2]] > 0).all()
