"""Memory snapshots in torch's format, for pytorch.org/memory_viz and torch's ``_memory_viz.py``.

A snapshot is a dictionary of ``segments`` with their blocks and ``device_traces``, the events of
each device (docs.pytorch.org, "Understanding CUDA Memory Usage", snapshot API reference).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prismscale.analysis.memory.memory_log import NOBODY, Action, MemoryLog
from prismscale.files import write_bytes

Frames = list[dict[str, Any]]
ACTIONS = {
    Action.ALLOC: "alloc",
    Action.FREE_REQUESTED: "free_requested",
    Action.FREE_COMPLETED: "free_completed",
    Action.SEGMENT_ALLOC: "segment_alloc",
    Action.SEGMENT_FREE: "segment_free",
    Action.SEGMENT_MAP: "segment_map",
    Action.SEGMENT_UNMAP: "segment_unmap",
}


class SnapshotBlock(NamedTuple):
    """One block of the allocator."""

    address: int
    size_bytes: int
    requested_bytes: int
    stream: int
    allocated: bool
    is_small: bool
    starts_segment: bool
    pool: tuple[int, int] = (0, 0)
    frames: Frames | None = None


def segments(blocks: Iterable[SnapshotBlock], device: int) -> list[dict[str, Any]]:
    """Return the segments that contain ``blocks``, which must be ordered by address."""
    found: list[dict[str, Any]] = []
    for block in blocks:
        if block.starts_segment or not found:
            found.append(_segment(block, device))
        _add_block(found[-1], block)
    return found


def _segment(block: SnapshotBlock, device: int) -> dict[str, Any]:
    return {
        "device": device,
        "address": block.address,
        "stream": block.stream,
        "segment_type": "small" if block.is_small else "large",
        "segment_pool_id": block.pool,
        "is_expandable": False,
        "total_size": 0,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "frames": [],
        "blocks": [],
    }


def _add_block(segment: dict[str, Any], block: SnapshotBlock) -> None:
    segment["total_size"] += block.size_bytes
    if block.allocated:
        segment["allocated_size"] += block.size_bytes
        segment["active_size"] += block.size_bytes
        segment["requested_size"] += block.requested_bytes
    segment["blocks"].append(
        {
            "address": block.address,
            "size": block.size_bytes,
            "requested_size": block.requested_bytes,
            "state": "active_allocated" if block.allocated else "inactive",
            "frames": block.frames or [],
        }
    )


def trace(log: MemoryLog, frames: Callable[[int], Frames], first: int = 0) -> list[dict[str, Any]]:
    """Return the events of a log from ``first`` on; ``frames`` gives an allocation's frames."""
    columns = (log.action_E, log.address_E, log.bytes_E, log.stream_E, log.time_ns_E)
    rows = zip(*(column[first:].tolist() for column in columns), strict=True)
    return [
        {
            "action": ACTIONS[Action(action)],
            "addr": address,
            "size": n_bytes,
            "stream": stream,
            "time_us": time_ns // 1000,
            "compile_context": "N/A",
            "user_metadata": "",
            "frames": frames(event) if action == Action.ALLOC else [],
        }
        for event, (action, address, n_bytes, stream, time_ns) in enumerate(rows, start=first)
    ]


def snapshot(found: list[dict[str, Any]], traces: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the whole snapshot: the segments of all devices, and the events of each device."""
    return {
        "segments": found,
        "device_traces": list(traces),
        "allocator_settings": {},
        "external_annotations": [],
    }


def log_snapshot(log: MemoryLog) -> dict[str, Any]:
    """Return the snapshot of a captured rank.

    Frames are the operator, the program's line that requested the block, the module whose forward
    was running, and the tensor's kind and name, where they are known.
    """
    made: dict[int, int] = {}
    for event in log.alive(log.n_events - 1).tolist():
        made[int(log.address_E[event])] = event
    columns = (
        log.block_address_B,
        log.block_size_B,
        log.block_requested_B,
        log.block_stream_B,
        log.block_flags_B,
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    blocks = [
        SnapshotBlock(
            address=address,
            size_bytes=size,
            requested_bytes=requested,
            stream=stream,
            allocated=bool(flags & 1),
            is_small=bool(flags & 2),
            starts_segment=bool(flags & 4),
            frames=_frames(log, made[address]) if flags & 1 and address in made else None,
        )
        for address, size, requested, stream, flags in rows
    ]
    return snapshot(segments(blocks, 0), [trace(log, lambda event: _frames(log, event))])


def _frames(log: MemoryLog, event: int) -> Frames:
    number, owner = int(log.origin_E[event]), int(log.owner_E[event])
    found = [_frame(log.tables.ops[int(log.made_by_E[event])])]
    if number > 0:
        origin = log.tables.origins[number]
        filename, _, line = origin.site.rpartition(":")
        if filename:
            found.append(_frame(origin.module or "program", filename, int(line)))
        elif origin.module:
            found.append(_frame(origin.module))
    if owner != NOBODY:
        found.append(_frame(": ".join(log.tables.owners[owner])))
    return found


def _frame(name: str, filename: str = "??", line: int = 0) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


def write_snapshot(found: dict[str, Any], path: Path) -> None:
    """Write a snapshot as torch's ``_dump_snapshot`` does. Raises :class:`StorageError`."""
    write_bytes(path, pickle.dumps(found))
