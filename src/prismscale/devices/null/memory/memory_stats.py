"""Memory statistics and snapshots of the null device in the form of ``torch.cuda.memory``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from prismscale.cost.kernel_signature import FIELD
from prismscale.devices.null.bindings import BlockRow
from prismscale.formats.memory_snapshot import SnapshotBlock, segments
from prismscale.formats.memory_snapshot import snapshot as whole_snapshot

_METRICS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
_BY_PRIVATE_POOL = "reserved_bytes_by_private_pools"
_POOLS = ("all", "small_pool", "large_pool")
_STATS = ("current", "peak", "allocated", "freed")
_OVERSIZE = ("oversize_allocations", "oversize_segments")
_COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveBlock:
    """An allocated block: its size and the op that allocated it."""

    address: int
    size_bytes: int
    requested_bytes: int
    stream: int
    made_by: str
    outputs: str
    """Shapes of that op's results, as in its signature."""


def nested_stats(words: list[int]) -> dict[str, Any]:
    """Return the nested result of ``torch._C._cuda_memoryStats`` from the extension's words."""
    source = iter(words)
    stats: dict[str, Any] = {
        metric: {pool: {name: next(source) for name in _STATS} for pool in _POOLS}
        for metric in _METRICS
    }
    for metric in _OVERSIZE:
        stats[metric] = {name: next(source) for name in _STATS}
    for counter in _COUNTERS:
        stats[counter] = next(source)
    return stats | {"max_split_size": -1}


def read_stats(library: ctypes.PyDLL, device: int) -> dict[str, Any]:
    """Return the present statistics of ``device``."""
    words = (ctypes.c_int64 * library.ps_stats_words())()
    library.ps_memory_stats(device, words)
    stats = nested_stats(list(words))
    if _BY_PRIVATE_POOL in (torch.cuda.memory_stats.__doc__ or ""):  # since torch 2.13
        stats[_BY_PRIVATE_POOL] = _reserved_by_pool(library, device)
    return stats


def _reserved_by_pool(library: ctypes.PyDLL, device: int) -> dict[tuple[int, int], Any]:
    count = library.ps_pool_stats(device, None, 0)
    width = 2 + len(_POOLS) * len(_STATS)
    words = (ctypes.c_int64 * (count * width))()
    library.ps_pool_stats(device, words, count)
    found: dict[tuple[int, int], Any] = {}
    for start in range(0, count * width, width):
        source = iter(words[start + 2 : start + width])
        found[words[start], words[start + 1]] = {
            pool: {name: next(source) for name in _STATS} for pool in _POOLS
        }
    return found


def read_blocks(library: ctypes.PyDLL, device: int) -> list[BlockRow]:
    """Return all blocks of ``device``, allocated or not, ordered by stream and address."""
    count = library.ps_blocks(device, None, 0)
    rows = (BlockRow * count)()
    library.ps_blocks(device, rows, count)
    return list(rows)


def live_blocks(library: ctypes.PyDLL, device: int) -> list[LiveBlock]:
    """Return the allocated blocks of ``device``, largest first."""
    return _allocated(library, read_blocks(library, device))


def blocks_at_out_of_memory(library: ctypes.PyDLL, device: int) -> list[LiveBlock]:
    """Return the blocks that were allocated when ``device`` last ran out of memory.

    Many of them are freed by now, while the exception unwinds.
    """
    count = library.ps_oom_blocks(device, None, 0)
    rows = (BlockRow * count)()
    library.ps_oom_blocks(device, rows, count)
    return _allocated(library, list(rows))


def _allocated(library: ctypes.PyDLL, blocks: list[BlockRow]) -> list[LiveBlock]:
    rows = [row for row in blocks if row.allocated]
    rows.sort(key=lambda row: -row.size_bytes)
    return [_live_block(row, library.ps_signature(row.made_by).decode()) for row in rows]


def _live_block(row: BlockRow, signature: str) -> LiveBlock:
    made_by, _, shapes = signature.partition(FIELD)
    return LiveBlock(
        address=row.address,
        size_bytes=row.size_bytes,
        requested_bytes=row.requested_bytes,
        stream=row.stream,
        made_by=made_by,
        outputs=shapes.split(FIELD)[1] if FIELD in shapes else "",
    )


def snapshot(
    library: ctypes.PyDLL, devices: int, pool: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Return the result of ``torch.cuda.memory._snapshot``: segments with blocks, but no traces.

    ``pool``: the private pool to which it is limited; None or zeros: all memory.
    """
    found: list[dict[str, Any]] = []
    for device in range(devices):
        rows = (row for row in read_blocks(library, device) if row.mapped)
        wanted = (r for r in rows if not (pool and any(pool)) or pool == tuple(r.pool))
        found += segments(map(_snapshot_block, wanted), device)
    return whole_snapshot(found, [])


def _snapshot_block(row: BlockRow) -> SnapshotBlock:
    return SnapshotBlock(
        address=row.address,
        size_bytes=row.size_bytes,
        requested_bytes=row.requested_bytes,
        stream=row.stream,
        allocated=bool(row.allocated),
        is_small=bool(row.is_small),
        starts_segment=bool(row.starts_segment),
        pool=(row.pool[0], row.pool[1]),
    )
