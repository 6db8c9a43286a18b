"""A job as the recorder writes it, for tests of reports: FSDP-like prefetch on a pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np

from prismscale.analysis.observation import Observation
from prismscale.analysis.result import RunResult
from prismscale.analysis.stages import shown_ranks
from prismscale.analysis.summary import Findings, summarise
from prismscale.cluster import Cluster
from prismscale.cost.collective import collective_model
from prismscale.durations.faults import Faults
from prismscale.durations.graph_durations import GraphDurations
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, MemoryRecord, RankTrace
from prismscale.sim.retime import retime
from prismscale.sim.timeline import Timeline
from support.jobs import job_from_traces, mesh_groups

DATA, PIPE = 1, 2
MIB, MS = 2**20, 1_000_000


class StageWriter:
    """Writes one pipeline stage's trace, as the recorder would: one host lane, one lane a group."""

    def __init__(
        self, stage: int, stages: int, rank: int, records: tuple[GroupRecord, ...], samples: int
    ) -> None:
        own = [g for g in records if rank in g.ranks]
        self._noise = np.random.default_rng(stage)
        self._samples, self._stage, self._stages = samples, stage, stages
        self._records, self._own = records, own
        self._builder = TraceBuilder(rank=rank, world_size=len(records[0].ranks), groups=own)
        self._last = self._builder.add_compute(MS, label="forward", site="train.py:12")

    def trace(self, microbatches: int, layers: int) -> RankTrace:
        """1F1B over ``microbatches``, each layer's parameters gathered one layer ahead."""
        self._builder.begin_body()
        # The step begins where the last one ended: one body back.
        first = self._compute(0.2, "forward", [len(self._builder)])
        warm_up = min(self._stages - self._stage - 1, microbatches)
        for _ in range(warm_up):
            self._pass(layers, forward=True)
        for _ in range(microbatches - warm_up):
            self._pass(layers, forward=True)
            self._pass(layers, forward=False)
        for _ in range(warm_up):
            self._pass(layers, forward=False)
        reduced = self._collective(CollectiveOp.REDUCE_SCATTER, 64 * MIB, "train.py:61")
        self._compute(3, "optimizer", [self._last, reduced])
        self._close(first)
        return self._builder.build(
            known_groups=self._records,
            memory=MemoryRecord(
                peak_bytes=900 * MIB - 4 * MIB * self._stage, peak_step=0, source="measured"
            ),
        )

    def _close(self, first: int) -> None:
        """Make the body's first node follow the node that the previous body ends with."""
        nodes = self._builder._nodes
        nodes[first].preds = (self._last - (len(nodes) - first),)

    def _pass(self, layers: int, *, forward: bool) -> None:
        label, ms = ("forward", 0.8) if forward else ("backward", 1.7)
        behind, ahead = (-1, +1) if forward else (+1, -1)
        if 0 <= self._stage + behind < self._stages:
            received = self._p2p(CollectiveOp.RECV, behind)
            self._compute(0.01, label, [self._last, received])
        gathered = self._collective(CollectiveOp.ALL_GATHER, 48 * MIB, "train.py:44")
        for _ in range(layers):
            ready, gathered = (
                gathered,
                self._collective(CollectiveOp.ALL_GATHER, 48 * MIB, "train.py:44"),
            )
            self._compute(ms * (1 + 0.02 * self._stage), label, [self._last, ready])
        if 0 <= self._stage + ahead < self._stages:
            self._p2p(CollectiveOp.SEND, ahead)

    def _compute(self, ms: float, label: str, preds: list[int]) -> int:
        factors = 1 + 0.01 * self._noise.standard_normal(self._samples)
        self._last = self._builder.add_compute(
            [round(ms * MS * f) for f in factors], preds=preds, label=label
        )
        return self._last

    def _collective(self, op: CollectiveOp, n_bytes: int, site: str) -> int:
        name = self._own[DATA].name
        return self._builder.add_communication(
            op, n_bytes, group_index=DATA, preds=[self._last], site=site, lane=name
        )

    def _p2p(self, op: CollectiveOp, peer: int) -> int:
        name = self._own[PIPE].name
        return self._builder.add_communication(
            op,
            8 * MIB,
            group_index=PIPE,
            peer=peer,
            preds=[self._last],
            site="train.py:52",
            lane=name,
        )


def report_job(
    *,
    pp: int = 4,
    dp: int = 8,
    microbatches: int = 6,
    layers: int = 2,
    samples: int = 4,
    data_name: str = "dp_shard",
) -> JobGraph:
    """The graph of ``pp × dp`` ranks."""
    mesh = np.arange(pp * dp).reshape(pp, dp)
    records = mesh_groups(mesh, {data_name: 1, "pp": 0})
    traces = {}
    for stage in range(pp):
        rank = int(mesh[stage, 0])
        writer = StageWriter(stage, pp, rank, records, samples)
        traces[rank] = writer.trace(microbatches, layers)
    return job_from_traces(traces)


def report_run(
    *,
    live: bool = True,
    hang: dict[int, int] | None = None,
    command: str = "examples/llama/train.py --model debug --tp 8",
    **job: Any,
) -> tuple[RunResult, Timeline, GraphDurations]:
    """Simulate and summarise :func:`report_job`, with two live ranks unless it hangs."""
    graph = report_job(**job)
    cluster = Cluster.load("h100-sxm")
    model = collective_model(cluster)
    durations = GraphDurations(
        graph=graph, model=model, faults=Faults(hang=hang or {}), sampled=not hang
    )
    retimed = retime(durations, ranks=shown_ranks(graph))
    timeline = retimed.timeline
    result = summarise(
        Findings(
            graph=graph,
            durations=durations,
            retimed=retimed,
            observed=[observation(r, timeline) for r in (0, graph.world_size // 2) if live],
            distinct_axes=("pp",) if len(graph.classes) > 1 else (),
            witnesses=(1,),
            memory={
                int(c.members_M[0]): c.trace.memory
                for c in graph.classes
                if c.trace.memory is not None
            },
            captured=tuple(sorted({1, *(r for c in graph.coverage for r in c.captured)})),
        ),
        command=command,
        cluster=cluster,
        device="cpu",
        variability="",
        wall_s={"capture": 41.7, "assemble": 0.4, "simulate": 0.25, "live": 133.1},
        peak_rss_bytes=1_930 * MIB,
    )
    return result, timeline, durations


def observation(rank: int, timeline: Timeline, steps: int = 12) -> Observation:
    """What a live rank that runs about as predicted would have observed."""
    noise = np.random.default_rng(rank + 1).normal(1.004, 0.01, steps)
    ends = np.cumsum(timeline.step_ns * noise).astype(int).tolist()
    return Observation(
        rank=rank,
        step_end_ns=(0, *ends),
        step_wait_ns=(MS,) * (steps + 1),
        step_lag_ns=(20_000,) * (steps + 1),
        peak_bytes=899 * MIB,
        boot_s=4.2,
        communications=640,
        uncovered=2 if rank else 0,
    )
