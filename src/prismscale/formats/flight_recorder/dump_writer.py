"""Writes flight records as torch does: a pickle for each rank, named ``PREFIX<rank>``.

A record made from a graph gives sizes in bytes (dtype ``Byte``), because a graph knows only bytes.
Times only show the order of the calls, a microsecond apart: the graph of a job that hangs has no
other times.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prismscale.files import atomic_write
from prismscale.formats.flight_recorder.rank_calls import (
    CallColumns,
    CallShape,
    CallState,
    FlightRecord,
    RankCalls,
    RecordedGroup,
)

VERSION = "2.10"
PREFIX = "nccl_trace_rank_"
MOST_CALLS = 2_000
"""Most calls of one rank: as many as torch keeps by default."""
MOST_CALLS_OF_ALL = 1_500_000
"""Most calls of all ranks together: about 200 MB."""
FEWEST_CALLS = 64
STEP_NS = 1_000


def write_flight_record(record: FlightRecord, folder: Path) -> list[Path]:
    """Write a file for each rank of ``record``, one after the other.

    Raises:
        StorageError: a file cannot be written.
    """
    most = max(FEWEST_CALLS, min(MOST_CALLS, MOST_CALLS_OF_ALL // max(record.world_size, 1)))
    return [_write(record, record.ranks[rank], folder, most) for rank in sorted(record.ranks)]


def _write(record: FlightRecord, calls: RankCalls, folder: Path, most: int) -> Path:
    path = folder / f"{PREFIX}{calls.rank}"
    with atomic_write(path) as file:
        file.write(pickle.dumps(dump_of(record, calls, most), protocol=2))
    return path


def dump_of(record: FlightRecord, calls: RankCalls, most: int = MOST_CALLS) -> dict[str, Any]:
    """Return what torch's recorder would hold of one rank, with its last ``most`` calls."""
    return {
        "version": VERSION,
        "entries": list(_entries(record, calls, most)),
        "pg_config": {
            group.name: {
                "name": group.name,
                "desc": group.description,
                "ranks": str(list(group.ranks)),
            }
            for group in calls.groups
        },
        "pg_status": {
            group.name: _status(calls.columns, index) for index, group in enumerate(calls.groups)
        },
    }


def _status(columns: CallColumns, group: int) -> dict[str, int]:
    own = (columns.group_N == group) & (columns.peer_N < 0)

    def last(state: CallState) -> int:
        found = columns.seq_N[own & (columns.state_N >= state)]
        return int(found[-1]) if len(found) else -1

    return {
        "last_enqueued_collective": last(CallState.SCHEDULED),
        "last_started_collective": last(CallState.STARTED),
        "last_completed_collective": last(CallState.COMPLETED),
    }


def _entries(record: FlightRecord, calls: RankCalls, most: int) -> Iterator[dict[str, Any]]:
    columns = calls.columns.last(most)
    first = calls.columns.n_calls - columns.n_calls
    frames = [[_frame(site)] for site in record.sites]
    rows = zip(
        *(
            column.tolist()
            for column in (
                columns.group_N,
                columns.shape_N,
                columns.peer_N,
                columns.seq_N,
                columns.state_N,
                columns.site_N,
            )
        ),
        strict=True,
    )
    for n, (group_index, shape_index, peer, seq, state, site) in enumerate(rows, start=first):
        group, shape = calls.groups[group_index], record.shapes[shape_index]
        dtypes = list(shape.dtypes)
        yield {
            "record_id": n,
            "pg_id": group_index,
            "process_group": (group.name, group.description),
            "collective_seq_id": 0 if shape.is_p2p else seq,
            "p2p_seq_id": seq if shape.is_p2p else 0,
            "op_id": n + 1,
            "profiling_name": _profiling_name(shape, group, calls.rank, peer),
            "input_sizes": shape.input_sizes,
            "input_dtypes": dtypes,
            "output_sizes": shape.output_sizes,
            "output_dtypes": dtypes,
            "time_created_ns": n * STEP_NS,
            "timeout_ms": 600_000,
            "state": CallState(state).name.lower(),
            "frames": frames[site] if site >= 0 else [],
            "is_p2p": shape.is_p2p,
            "retired": state == CallState.COMPLETED,
            "time_discovered_started_ns": n * STEP_NS if state >= CallState.STARTED else None,
            "time_discovered_completed_ns": n * STEP_NS if state == CallState.COMPLETED else None,
        }


def _profiling_name(shape: CallShape, group: RecordedGroup, rank: int, peer: int) -> str:
    if not shape.is_p2p:
        return f"nccl:{shape.op}"
    own = group.ranks.index(rank)
    other = (own + peer) % len(group.ranks)
    arrow = "->" if shape.op == "send" else "<-"
    return f"nccl:{shape.op} {own}{arrow}{other}"


def _frame(site: str) -> dict[str, Any]:
    filename, _, line = site.rpartition(":")
    return {
        "name": "<module>",
        "filename": filename or site,
        "line": int(line) if line.isdecimal() and line.isascii() and len(line) < 10 else 0,
    }
