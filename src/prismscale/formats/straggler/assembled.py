"""Turns a straggler trace into a job's graph and the durations of its steps.

A worker (one cell of the data × pipeline grid) is one rank of the graph, numbered
``stage * data-parallel size + replica`` as Megatron does; the tensor and sequence parallel ranks
inside it are not in the trace. Workers of one stage that take part in the same hidden barriers
share a class.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.samples import ClassSamples, StepSamples
from prismscale.errors import FormatError, shown
from prismscale.foreign import reading
from prismscale.formats.imported import ImportedTrace
from prismscale.formats.straggler.barriers import hidden_barriers
from prismscale.formats.straggler.rank_programs import StragglerJob, worker_program
from prismscale.formats.straggler.separate import Separated, separate
from prismscale.formats.straggler.structure import (
    Group,
    StageUnits,
    TracedCollective,
    collectives,
    stage_units,
)
from prismscale.formats.straggler.table import OpTable, Repairs
from prismscale.formats.straggler.trace_reader import MAX_ROWS, read_table
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import GroupTable
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.trace import HOST, GroupRecord, RankTrace
from prismscale.graph.verify import verify
from prismscale.typed_files import text_of


def read_straggler(
    trace: Path, *, meta: Path | None = None, max_rows: int = MAX_ROWS
) -> ImportedTrace:
    """Import a ByteDance straggler trace.

    Args:
        trace: the Parquet file (``trace-NAME.parquet``).
        meta: the metadata (``meta-NAME.yaml``); None looks beside the trace, and does without if
            there is none.
        max_rows: see :func:`prismscale.formats.straggler.trace_reader.read_table`.

    Raises:
        FormatError: a file is damaged or foreign, or lacks workers.
    """
    with reading(trace, "a straggler trace"):
        return _read(trace, meta, max_rows)


def _read(trace: Path, meta: Path | None, max_rows: int) -> ImportedTrace:
    repairs = Repairs()
    beside = trace.with_name(trace.name.replace("trace-", "meta-")).with_suffix(".yaml")
    if meta is None and beside != trace and beside.exists():
        meta = beside
    facts = read_meta(meta) if meta else {}
    shape = (int(facts["dp_size"]), int(facts["pp_size"])) if facts else None
    table = read_table(trace, repairs, shape=shape, max_rows=max_rows)
    job, table = _take_apart(trace, table, repairs)
    graph = _graph(job, {"source": "straggler", **facts})
    verify(graph)
    return ImportedTrace(
        samples=StepSamples(
            graph=graph,
            step_ids=table.step_ids,
            classes=tuple(_class_samples(job, c, graph) for c in graph.classes),
            stage_R=np.arange(graph.world_size) // job.n_replicas,
            replica_R=np.arange(graph.world_size) % job.n_replicas,
            observed_step_ns_T=table.step_ns_T,
        ),
        repairs=tuple(repairs.sentences()),
    )


def read_meta(path: Path) -> dict[str, str]:
    """Read the metadata of a trace: lines of ``name: value``.

    Raises:
        FormatError: a line has another form, or sizes are missing or no positive numbers.
    """
    facts: dict[str, str] = {}
    for line in text_of(path).splitlines():
        name, colon, value = line.partition(":")
        if line.strip() and not colon:
            raise FormatError(f"{path}: {shown(line)} is not 'name: value'")
        if line.strip():
            facts[name.strip()] = value.strip()
    for name in ("dp_size", "pp_size"):
        if re.fullmatch(r"[1-9]\d{0,6}", facts.get(name, "")) is None:
            raise FormatError(f"{path}: {name} is missing or not a positive number")
    return facts


def _take_apart(path: Path, table: OpTable, repairs: Repairs) -> tuple[StragglerJob, OpTable]:
    """Split a trace into units, collectives and times.

    Steps with clock jumps are left out of the table, and the rest is split anew.
    """
    stages, meets, parts = _separated(table, Repairs())
    if parts.disordered_T.any():
        bad = [table.step_ids[i] for i in np.flatnonzero(parts.disordered_T)]
        repairs.skip(bad, "operations out of order by more than 10 ms: a clock jumped")
        if len(bad) == len(table.step_ids):
            raise FormatError(
                f"{path}: in every step operations of one worker overlap, or communications end "
                "before all members arrive, by more than 10 ms; clocks that differ so much, and "
                "communication overlapped with computation, cannot be imported"
            )
        table = table.select(np.flatnonzero(~parts.disordered_T))
    stages, meets, parts = _separated(table, repairs)
    job = StragglerJob(
        n_replicas=table.n_replicas,
        stages=tuple(stages),
        collectives=tuple(meets),
        parts=parts,
        hidden=hidden_barriers(stages, parts),
    )
    return job, table


def _separated(
    table: OpTable, repairs: Repairs
) -> tuple[list[StageUnits], list[TracedCollective], Separated]:
    stages = [stage_units(s) for s in table.stages]
    meets = collectives(table)
    return stages, meets, separate(stages, meets, table.origin_ns_T, repairs)


def _graph(job: StragglerJob, meta: dict[str, str]) -> JobGraph:
    n_replicas, n_stages = job.n_replicas, len(job.stages)
    groups = _groups(job)
    twins: dict[tuple[int, tuple[int, ...]], int] = {}
    representative_R = np.array(
        [
            twins.setdefault((s, job.barriers_of(s, d)), s * n_replicas + d)
            for s in range(n_stages)
            for d in range(n_replicas)
        ],
        dtype=np.int64,
    )
    traces = {rank: _trace(job, rank, groups) for rank in twins.values()}
    return assemble(traces, representative_R, groups, meta=meta)


def _groups(job: StragglerJob) -> GroupTable:
    n_replicas, n_stages = job.n_replicas, len(job.stages)
    grid_SD = np.arange(n_stages * n_replicas).reshape(n_stages, n_replicas)
    ranks: list[tuple[int, ...]] = [tuple(range(grid_SD.size))]
    names = [Group.WORLD.value]
    ranks += [tuple(row) for row in grid_SD.T.tolist()]
    names += [Group.PIPELINE.value] * n_replicas
    ranks += [tuple(row) for row in grid_SD.tolist()]
    names += [Group.DATA.value] * n_stages
    for collective in job.collectives:
        if collective.group is Group.EMBEDDING:
            ends = sorted({s for s, _ in collective.members})
            ranks += [tuple(row) for row in grid_SD[ends].T.tolist()]
            names += [Group.EMBEDDING.value] * n_replicas
            break
    group_indices: list[list[int]] = [[] for _ in range(grid_SD.size)]
    positions: list[list[int]] = [[] for _ in range(grid_SD.size)]
    for index, members in enumerate(ranks):
        for position, rank in enumerate(members):
            group_indices[rank].append(index)
            positions[rank].append(position)
    return GroupTable(
        ranks=tuple(ranks),
        names=tuple(names),
        groups_R=tuple(map(tuple, group_indices)),
        positions_R=tuple(map(tuple, positions)),
    )


def _trace(job: StragglerJob, rank: int, groups: GroupTable) -> RankTrace:
    stage, replica = divmod(rank, job.n_replicas)
    own = [GroupRecord(ranks=groups.ranks[g], name=groups.names[g]) for g in groups.of_rank(rank)]
    index_of = {record.name: group_index for group_index, record in enumerate(own)}
    builder = TraceBuilder(rank=rank, world_size=len(groups.groups_R), groups=own)
    builder.begin_body()
    for step in worker_program(job, stage, replica):
        if step.is_compute:
            durations = job.compute_ns_TD(stage, step)[:, replica].tolist()
            lane = HOST if step.unit < 0 else "compute"
            builder.add_compute(durations, preds=step.preds, label=step.label, lane=lane)
        else:
            durations_T = job.communication_ns(step, np.array([replica]))[:, 0]
            builder.add_communication(
                step.op,
                0,
                group_index=index_of[step.group.value],
                peer=step.peer,
                preds=step.preds,
                durations_ns=durations_T.tolist(),
                label=step.label,
            )
    return builder.build()


def _class_samples(job: StragglerJob, rank_class: RankClass, graph: JobGraph) -> ClassSamples:
    stage, first = divmod(int(rank_class.members_M[0]), job.n_replicas)
    replicas = rank_class.members_M % job.n_replicas
    steps = worker_program(job, stage, first)
    return ClassSamples(
        body_ns=tuple(
            job.compute_ns_TD(stage, step)[:, replicas]
            if step.is_compute
            else job.communication_ns(step, _replicas_of_groups(job, rank_class, graph, i))
            for i, step in enumerate(steps)
        ),
        column_M=np.arange(rank_class.size),
        microbatch_B=np.array([step.microbatch for step in steps], dtype=np.int32),
    )


def _replicas_of_groups(
    job: StragglerJob, rank_class: RankClass, graph: JobGraph, node: int
) -> NDArray[np.int64]:
    """Return the replica of each group of the family that communication ``node`` uses."""
    group_index = int(rank_class.trace.group_index_N[node])
    table = graph.families[rank_class.slots[group_index].family].ranks_KG
    return np.asarray(table[0] % job.n_replicas, dtype=np.int64)
