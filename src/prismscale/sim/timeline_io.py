"""Timelines on disk: one row per rank, with its step ends and, if they were kept, its nodes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from prismscale.errors import FormatError
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.parquet import (
    MAX_VALUES,
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
from prismscale.sim.stuck import Hang
from prismscale.sim.timeline import RankTimeline, Timeline

NODE_TIMES = ("start_ns", "ready_ns", "end_ns")
SCHEMA = schema_of(
    step_end_ns=integers(64),
    first_position=pa.int64(),
    **dict.fromkeys(NODE_TIMES, integers(64)),
)
NOT_KEPT = -1
"""``first_position`` of a rank whose nodes were not kept."""


def save_timeline(timeline: Timeline, path: Path) -> None:
    """Write ``timeline`` to ``path``; its graph is not part of the file.

    Raises:
        StorageError: the file cannot be written. A file that was there before is unchanged.
    """
    steps, draws, world_size = timeline.step_end_ns_TDR.shape
    ends = timeline.step_end_ns_TDR.transpose(2, 0, 1).ravel()
    starts = np.arange(world_size + 1) * (steps * draws)
    kept = [timeline.ranks.get(rank) for rank in range(world_size)]
    columns: dict[str, Any] = {
        "step_end_ns": list_column(starts, ends, integers(64)),
        "first_position": column(
            np.array([k.first_position if k else NOT_KEPT for k in kept]), pa.int64()
        ),
    }
    for name in NODE_TIMES:
        rows = [_node_times(k, name) for k in kept]
        row_starts = np.cumsum([0, *map(len, rows)])
        columns[name] = list_column(row_starts, join(rows, np.int64), integers(64))
    header = {
        "graph": graph_digest(timeline.graph),
        "steps": steps,
        "draws": draws,
        "hangs": [
            {"what": h.what, "group": to_runs(h.group), "missing": to_runs(h.missing)}
            for h in timeline.hangs
        ],
    }
    write_table(path, pa.table(columns, schema=SCHEMA), kind="timeline", header=header)


def load_timeline(path: Path, graph: JobGraph) -> Timeline:
    """Read a timeline that :func:`save_timeline` wrote for ``graph``.

    Raises:
        UsageError: the file does not exist.
        FormatError: the file is damaged, foreign, of another version, or of another graph.
    """
    table, header = read_table(path, SCHEMA, kind="timeline")
    if header.text("graph") != graph_digest(graph) or table.num_rows != graph.world_size:
        raise FormatError(f"{path} belongs to another graph than the one given; simulate again")
    steps, draws = (header.integer(key, 1, MAX_VALUES) for key in ("steps", "draws"))
    row_starts, ends = lists(table, "step_end_ns")
    if (np.diff(row_starts) != steps * draws).any():
        raise header.error("steps", "does not fit the step ends of every rank")
    by_rank = ends.reshape(graph.world_size, steps, draws)
    return Timeline(
        graph=graph,
        step_end_ns_TDR=np.ascontiguousarray(by_rank.transpose(1, 2, 0)),
        ranks=_kept_ranks(table, header, graph),
        hangs=tuple(_hang(s, graph.world_size) for s in header.sections("hangs")),
    )


def graph_digest(graph: JobGraph) -> str:
    """Hash the identity of a graph for its timelines: the program of every rank, not durations."""
    digest = hashlib.sha256()
    # Classes share traces, so each trace is hashed once.
    fingerprints = {id(c.trace): c.trace.fingerprint() for c in graph.classes}
    for rank_class in graph.classes:
        digest.update(fingerprints[id(rank_class.trace)].encode())
        digest.update(np.ascontiguousarray(rank_class.members_M, dtype=np.int64).tobytes())
    return digest.hexdigest()


def _node_times(kept: RankTimeline | None, name: str) -> NDArray[np.int64]:
    times = getattr(kept, f"{name}_N") if kept else None
    return np.zeros(0, dtype=np.int64) if times is None else times


def _kept_ranks(table: pa.Table, header: Header, graph: JobGraph) -> dict[int, RankTimeline]:
    first_R = numbers(table, "first_position")
    columns = {name: lists(table, name) for name in NODE_TIMES}
    kept: dict[int, RankTimeline] = {}
    for rank in np.flatnonzero(first_R != NOT_KEPT).tolist():
        start, ready, end = (values[at[rank] : at[rank + 1]] for at, values in columns.values())
        fits = len(start) == len(end) and len(ready) in (0, len(start))
        if not fits or not 0 <= first_R[rank] < MAX_VALUES:
            raise header.error("rows", f"have node times of rank {rank} that do not fit together")
        kept[rank] = RankTimeline(
            rank=rank,
            class_index=int(graph.class_of_R[rank]),
            first_position=int(first_R[rank]),
            start_ns_N=start,
            end_ns_N=end,
            ready_ns_N=ready if len(ready) else None,
        )
    return kept


def _hang(section: Header, world_size: int) -> Hang:
    return Hang(
        what=section.text("what"),
        group=section.runs("group", 0, world_size),
        missing=section.runs("missing", 0, world_size),
    )
