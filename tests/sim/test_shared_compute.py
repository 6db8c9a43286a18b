"""Computation beside communication is slower: its multiprocessors are held."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.cluster import Cluster
from prismscale.cost.nccl.occupancy import ring_channels, slowdown
from prismscale.durations.altered import Alteration
from prismscale.durations.faults import Faults
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.node_kernels import NodeKernels
from prismscale.durations.scenario import Scenario
from prismscale.errors import UsageError
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.io import load_graph
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import RankTrace
from prismscale.runfolder import RunFolder
from prismscale.sim.hoped import HopedJob, hoped_job
from prismscale.sim.retime import retime
from prismscale.sim.shared_compute import HeldBlocks, sharing_compute
from support.jobs import job_from_traces, mesh_groups
from support.null_run import stored_null_run

H100 = Cluster.load("h100-sxm")
MIB = 2**20
COMPUTE_NS = 50_000_000


@dataclass(frozen=True, kw_only=True)
class Products(NodeKernels):
    """All computation is matrix products, but for nodes without kernels."""

    recosting: None = None  # type: ignore[assignment]
    without: frozenset[int] = field(default_factory=frozenset)

    def share_of(self, trace: RankTrace, node: int, kinds: object) -> float | None:
        return None if node in self.without else 1.0


def job(*, beside: bool) -> JobGraph:
    """An all-reduce of the whole job and a product, at the same time or one after the other."""
    records = mesh_groups(np.arange(16), {"dp": 0})
    builder = TraceBuilder(rank=0, world_size=16, groups=records)
    first = builder.add_compute(1_000, preds=[-1])
    reduced = builder.add_communication(
        CollectiveOp.ALL_REDUCE, 256 * MIB, group_index=0, preds=[first], lane="comm"
    )
    product = builder.add_compute(COMPUTE_NS, preds=[first if beside else reduced])
    builder.add_compute(1_000, preds=[reduced, product])
    return job_from_traces({0: builder.build(known_groups=records)})


def durations(graph: JobGraph) -> GraphDurations:
    return Scenario(cluster=H100).durations(graph)


def step_ns(found: GraphDurations) -> int:
    return retime(found).step_ns


def test_a_product_loses_what_the_channels_hold_while_they_hold_it() -> None:
    """The all-reduce is the shorter one: the product goes on alone afterwards."""
    alone = durations(job(beside=True))
    reduced_ns = int(alone.communication_ns(0, 1).max())
    assert reduced_ns < COMPUTE_NS
    factor = slowdown(ring_channels("h100-sxm"), 132, 1.0)

    longer = step_ns(sharing_compute(alone, H100, Products())) - step_ns(alone)

    assert longer == pytest.approx(reduced_ns * (1 - 1 / factor), rel=1e-3)


def test_what_runs_after_a_communication_loses_nothing() -> None:
    """Nor does a stretch that is no kernel's: the host's own work."""
    after = durations(job(beside=False))
    assert step_ns(sharing_compute(after, H100, Products())) == step_ns(after)
    launches = durations(job(beside=True))
    nobody = Products(without=frozenset(range(4)))
    assert step_ns(sharing_compute(launches, H100, nobody)) == step_ns(launches)


def hoped(root: Path, *what_ifs: str) -> HopedJob:
    """A stored run under what-ifs."""
    folder = RunFolder(root=root)
    scenario = replace(Scenario.load(folder.scenario), what_ifs=what_ifs)
    return hoped_job(load_graph(folder.graph), Alteration(scenario=scenario, root=root))


def test_a_stored_run_answers_alone_as_beside_a_what_if_that_changes_nothing(
    tmp_path: Path,
) -> None:
    """What it touches is told, and the step is longer."""
    root = stored_null_run(tmp_path)
    alone = hoped(root, "compute=shared")
    both = hoped(root, "compute=shared", "kernel=gemm x1")

    assert alone.effects[0].count > 0
    assert "computations a step" in alone.effects[0].touches
    assert both.effects[0] == alone.effects[0]
    for c in alone.durations.graph.classes:
        assert alone.durations.body(c.index, 0) == both.durations.body(c.index, 0)


INTERVALS = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 50), st.integers(1, 16)))


@given(begun=INTERVALS, start=st.integers(0, 120), alone=st.integers(0, 80))
def test_the_loss_is_that_of_every_nanosecond(
    begun: list[tuple[int, int, int]], start: int, alone: int
) -> None:
    """As if the work were done in slices so small that nothing changes in them."""
    intervals = [(at, at + length, n) for at, length, n in begun]
    held = HeldBlocks(intervals)
    pace = {n: 1.0 + n / 8 for n in {0, *held.numbers}}

    found = held.stretched_ns(start, alone, pace)

    done = 0.0
    times = sorted({start, start + found, *(t for i in intervals for t in i[:2])})
    for begin, end in pairwise(t for t in times if start <= t <= start + found):
        now = (begin + end) / 2
        done += (end - begin) / pace[sum(n for a, b, n in intervals if a <= now < b)]
    assert done == pytest.approx(alone)
    assert alone <= found


def test_slow_ranks_beside_are_refused() -> None:
    """How long channels are held while they wait is another time on every rank."""
    scenario = Scenario(cluster=H100, faults=Faults(slow={1: 1.3}), what_ifs=("compute=shared",))
    with pytest.raises(UsageError, match="--slow"):
        hoped_job(job(beside=True), Alteration(scenario=scenario, root=Path()))
