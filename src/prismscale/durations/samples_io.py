"""Step samples on disk, beside their graph. Forecasts of an import or a run start from them.

``samples.parquet`` has one row for each body node of each class, in order: its microbatch and its
durations ``[steps, columns]``, flattened.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from prismscale.durations.samples import ClassSamples, StepSamples
from prismscale.errors import FormatError
from prismscale.graph.io import load_graph, save_graph
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.node import NodeKind
from prismscale.graph.parquet import (
    Header,
    column,
    integers,
    join,
    list_column,
    lists,
    numbers,
    read_table,
    schema_of,
    to_runs,
    write_table,
)
from prismscale.graph.trace import LONGEST_NS

SAMPLES_FILE = "samples.parquet"
SCHEMA = schema_of(microbatch=pa.int32(), duration_ns=integers(64))


def save_samples(samples: StepSamples, folder: Path) -> None:
    """Write the graph and its samples into ``folder``, which is created if need be.

    Raises:
        StorageError: a file cannot be written, or would be larger than readers accept.
    """
    save_graph(samples.graph, folder)
    arrays = [ns_TX.ravel() for c in samples.classes for ns_TX in c.body_ns]
    starts = np.cumsum([0, *(len(a) for a in arrays)])
    table = pa.table(
        [
            column(join([c.microbatch_B for c in samples.classes], np.int32), pa.int32()),
            list_column(starts, join(arrays, np.int64), SCHEMA.field("duration_ns").type),
        ],
        schema=SCHEMA,
    )
    observed = samples.observed_step_ns_T
    header = {
        "step_ids": to_runs(samples.step_ids),
        "stages": to_runs(samples.stage_R.tolist()),
        "replicas": to_runs(samples.replica_R.tolist()),
        "observed_step_ns": None if observed is None else observed.tolist(),
        "classes": [
            {"columns": to_runs(c.column_M.tolist()), "prologue_ns": list(c.prologue_ns)}
            for c in samples.classes
        ],
    }
    # Written after the graph, so that samples on disk always have their graph.
    write_table(folder / SAMPLES_FILE, table, kind="samples", header=header)


def has_samples(folder: Path) -> bool:
    """Return whether ``folder`` has a samples file for :func:`load_samples` to read."""
    return (folder / SAMPLES_FILE).exists()


def load_samples(folder: Path) -> StepSamples:
    """Read what :func:`save_samples` wrote.

    Raises:
        UsageError: there is no such file.
        FormatError: the file is damaged, foreign, or of another graph.
    """
    graph = load_graph(folder)
    path = folder / SAMPLES_FILE
    table, header = read_table(path, SCHEMA, kind="samples")
    sections = header.sections("classes")
    n_nodes = sum(c.trace.n_body for c in graph.classes)
    if len(sections) != len(graph.classes) or table.num_rows != n_nodes:
        raise FormatError(f"{path} belongs to another graph than the one beside it")
    step_ids = header.runs("step_ids", 0, 2**62)
    starts, values = lists(table, "duration_ns")
    if len(values) and (values.min() < 0 or values.max() > LONGEST_NS):
        raise FormatError(f"{path} holds durations out of range; make it again")
    microbatch = numbers(table, "microbatch")
    classes, row = [], 0
    for rank_class, section in zip(graph.classes, sections, strict=True):
        rows = range(row, row + rank_class.trace.n_body)
        column_M = np.array(section.runs("columns", 0, rank_class.size), dtype=np.int64)
        if len(column_M) != rank_class.size:
            raise section.error("columns", "must give every member a column")
        own = ClassSamples(
            body_ns=tuple(values[starts[r] : starts[r + 1]] for r in rows),
            column_M=column_M,
            microbatch_B=microbatch[row : rows.stop],
            prologue_ns=section.integers("prologue_ns", 0, LONGEST_NS),
        )
        classes.append(_shaped(path, graph, rank_class, own, len(step_ids)))
        row = rows.stop
    return StepSamples(
        graph=graph,
        step_ids=step_ids,
        classes=tuple(classes),
        stage_R=_by_rank(graph, header, "stages", -1),
        replica_R=_by_rank(graph, header, "replicas", 0),
        observed_step_ns_T=_observed(header, len(step_ids)),
    )


def _shaped(
    path: Path, graph: JobGraph, rank_class: RankClass, flat: ClassSamples, n_steps: int
) -> ClassSamples:
    """Reshape durations to ``[T, X]``, after a check that X fits the class or the family."""
    trace = rank_class.trace
    body: list[NDArray[np.int64]] = []
    for node, ns in enumerate(flat.body_ns):
        i = trace.n_prologue + node
        width = flat.n_columns
        if trace.kind_N[i] != NodeKind.COMPUTE:
            width = graph.families[rank_class.slots[int(trace.group_index_N[i])].family].n_groups
        if len(ns) not in (n_steps, n_steps * width):
            raise FormatError(
                f"{path}: node {node} of class {rank_class.index} has {len(ns)} durations; "
                f"{n_steps} or {n_steps * width} fit the graph"
            )
        body.append(ns.reshape(n_steps, -1))
    return ClassSamples(
        body_ns=tuple(body),
        column_M=flat.column_M,
        microbatch_B=flat.microbatch_B,
        prologue_ns=flat.prologue_ns,
    )


def _by_rank(graph: JobGraph, header: Header, key: str, low: int) -> NDArray[np.int64]:
    values = np.array(header.runs(key, low, 2**31), dtype=np.int64)
    if len(values) != graph.world_size:
        raise header.error(key, "must have a value for every rank")
    return values


def _observed(header: Header, n_steps: int) -> NDArray[Any] | None:
    if not header.has("observed_step_ns"):
        return None
    values = header.integers("observed_step_ns", 0, LONGEST_NS)
    if len(values) != n_steps:
        raise header.error("observed_step_ns", "must have a value for every step")
    return np.array(values, dtype=np.int64)
