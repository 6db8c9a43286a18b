"""Small synthetic jobs for tests and benchmarks: a pipeline × data × tensor parallel step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prismscale.durations.source import Duration
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import collect_groups
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.facts import CaptureFacts
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace

TENSOR, DATA, PIPE = 1, 2, 3
"""Group indices of the groups that every rank of :func:`pipeline_job` has; group index 0 is the
world."""


class RecordedDurations:
    """Durations as the traces hold them: sampled step ``k`` answers steps ``k, k + S, …``."""

    def __init__(self, graph: JobGraph) -> None:
        traces = [c.trace for c in graph.classes]
        self._prologue = [t.prologue_ns.tolist() for t in traces]
        self._body = [t.body_ns_SB.tolist() for t in traces]

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """Prologue durations of a class."""
        return self._prologue[class_index]

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Body durations of a class in ``step``."""
        rows = self._body[class_index]
        return rows[step % len(rows)]


@dataclass(kw_only=True)
class TableDurations:
    """Durations from plain tables; a step beyond the last listed one takes the last."""

    prologues: dict[int, list[Duration]]
    """By class."""
    bodies: dict[int, list[list[Duration]]]
    """By class, step and body node."""

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """Prologue durations of a class."""
        return self.prologues[class_index]

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Body durations of a class in ``step``."""
        steps = self.bodies[class_index]
        return steps[min(step, len(steps) - 1)]


def pipeline_job(
    pp: int, dp: int, tp: int, microbatches: int, *, layers: int = 1, samples: int = 1
) -> JobGraph:
    """A 1F1B training step on a ``[pp, dp, tp]`` mesh, one captured rank per pipeline stage.

    Every layer has two tensor-parallel all-reduces forward and two backward; stages exchange
    activations and gradients; a data-parallel all-reduce and the optimizer close the step.
    """
    return job_from_traces(
        pipeline_traces(pp, dp, tp, microbatches, layers=layers, samples=samples)
    )


def job_from_traces(
    traces: Mapping[int, RankTrace], represented: Mapping[int, int] | None = None
) -> JobGraph:
    """Assemble a job. ``represented`` names each rank's captured rank; without it every captured
    rank stands for itself and all ranks up to the next captured one."""
    world_size = next(iter(traces.values())).world_size
    if represented is None:
        captured = np.array(sorted(traces))
        nearest = np.searchsorted(captured, np.arange(world_size), side="right") - 1
        represented = dict(enumerate(captured[nearest].tolist()))
    representative_R = np.array([represented[r] for r in range(world_size)])
    return assemble(traces, representative_R, collect_groups(traces, world_size, representative_R))


def pipeline_traces(
    pp: int, dp: int, tp: int, microbatches: int, *, layers: int = 1, samples: int = 1
) -> dict[int, RankTrace]:
    """The captured traces of :func:`pipeline_job`, by rank."""
    world_size = pp * dp * tp
    mesh = np.arange(world_size).reshape(pp, dp, tp)
    records = mesh_groups(mesh, {"tp": 2, "dp": 1, "pp": 0})
    stages = (
        _Stage(s, pp, rank=int(mesh[s, 0, 0]), records=records, layers=layers, samples=samples)
        for s in range(pp)
    )
    return {s.rank: s.trace(microbatches) for s in stages}


def mesh_groups(mesh: np.ndarray, axes: Mapping[str, int]) -> tuple[GroupRecord, ...]:
    """The world, then every group of each mesh axis, as ``init_device_mesh`` creates them."""
    records = [GroupRecord(ranks=tuple(range(mesh.size)), name="world", backend="nccl")]
    for name, axis in axes.items():
        rows = np.moveaxis(mesh, axis, -1).reshape(-1, mesh.shape[axis])
        records += [
            GroupRecord(ranks=tuple(row), name=name, backend="nccl") for row in rows.tolist()
        ]
    return tuple(records)


class _Stage:
    """Writes the trace of one pipeline stage; every node follows the one before it."""

    def __init__(
        self,
        stage: int,
        n_stages: int,
        *,
        rank: int,
        records: tuple[GroupRecord, ...],
        layers: int,
        samples: int,
    ) -> None:
        self.rank = rank
        self._stage, self._n_stages = stage, n_stages
        self._records = records
        self._layers, self._samples = layers, samples
        own = [g for g in records if rank in g.ranks]
        self._builder = TraceBuilder(rank=rank, world_size=len(records[0].ranks), groups=own)
        self._last = self._builder.add_compute(1_000, label="setup", site="train.py:10")

    def trace(self, microbatches: int) -> RankTrace:
        self._builder.begin_body()
        self._last = self._builder.add_compute(
            50, preds=[self._last], label="load batch", site="train.py:20"
        )
        warm_up = min(self._n_stages - self._stage - 1, microbatches)
        for _ in range(warm_up):
            self._forward()
        for _ in range(microbatches - warm_up):
            self._forward()
            self._backward()
        for _ in range(warm_up):
            self._backward()
        self._collective(DATA, 1_000_000, 50_000, "train.py:40")
        self._compute(5_000, "optimizer", "train.py:41")
        return self._builder.build(
            known_groups=self._records, facts=CaptureFacts(device="synthetic")
        )

    def _forward(self) -> None:
        if self._stage > 0:
            self._receive(-1)
        self._block(10_000, "forward", "train.py:30")
        if self._stage < self._n_stages - 1:
            self._send(+1)

    def _backward(self) -> None:
        if self._stage < self._n_stages - 1:
            self._receive(+1)
        self._block(20_000, "backward", "train.py:31")
        if self._stage > 0:
            self._send(-1)

    def _block(self, ns: int, label: str, site: str) -> None:
        for _ in range(2 * self._layers):
            self._compute(ns, label, site)
            self._collective(TENSOR, 100_000, 5_000, site)

    def _compute(self, ns: int, label: str, site: str) -> None:
        durations = [ns + 7 * k for k in range(self._samples)]
        self._last = self._builder.add_compute(
            durations, preds=[self._last], label=label, site=site
        )

    def _collective(self, group_index: int, n_bytes: int, ns: int, site: str) -> None:
        self._last = self._builder.add_communication(
            CollectiveOp.ALL_REDUCE,
            n_bytes,
            group_index=group_index,
            preds=[self._last],
            durations_ns=ns,
            site=site,
        )
        self._compute(100, "launch", site)

    def _send(self, peer: int) -> None:
        # Nobody waits for a send: the stage goes on with its next microbatch.
        self._builder.add_communication(
            CollectiveOp.SEND,
            10_000,
            group_index=PIPE,
            peer=peer,
            preds=[self._last],
            durations_ns=3_000,
            site="train.py:35",
        )

    def _receive(self, peer: int) -> None:
        self._last = self._builder.add_communication(
            CollectiveOp.RECV,
            10_000,
            group_index=PIPE,
            peer=peer,
            preds=[self._last],
            site="train.py:36",
        )
        self._compute(10, "unpack", "train.py:36")
