"""Log of the allocator events of one rank's GPU, with what each block was used for.

The file ``memory-<rank>.parquet`` lies beside the trace. It holds one row of lists and covers the
time from the program's start until its memory settled.

Array axes: ``E`` events in program order, ``B`` blocks at the end of the log, by address.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from prismscale.errors import FormatError
from prismscale.graph.parquet import (
    MAX_VALUES,
    MAX_WORLD_SIZE,
    integers,
    list_column,
    lists,
    read_table,
    schema_of,
    write_table,
)

KIND = "memory log"
NOBODY = -1


def memory_path(folder: Path, rank: int) -> Path:
    """Return the path of a captured rank's log."""
    return folder / f"memory-{rank}.parquet"


class Action(IntEnum):
    """Kind of an allocator event. The numbers are those of ``csrc/caching_allocator.h``."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6


class Origin(NamedTuple):
    """The place in the program that requested a block."""

    site: str
    """``file:line`` of the program; empty where no Python code was running."""
    module: str
    """Name of the innermost module whose forward was running; empty for none."""
    is_unsharding: bool
    """Whether torch's fully_shard requested it: for whole parameters and gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """Tables that columns of a log index into."""

    ops: tuple[str, ...] = ()
    origins: tuple[Origin, ...] = ()
    """The first entry stands for an unknown origin."""
    labels: tuple[str, ...] = ()
    """Phases of the program: forward, backward."""
    owners: tuple[tuple[str, str], ...] = ()
    """Kind and name of tensors that the program's objects hold."""


@dataclass(frozen=True)
class MemoryLog:
    """The events of one rank and the tables they refer to; see the module."""

    rank: int
    tables: Tables
    step_starts: tuple[int, ...]
    """Index of the first event of each step; the first is 0."""
    action_E: NDArray[np.int64]
    address_E: NDArray[np.int64]
    bytes_E: NDArray[np.int64]
    """Bytes as requested."""
    block_bytes_E: NDArray[np.int64]
    """Bytes of the block, after rounding."""
    time_ns_E: NDArray[np.int64]
    """Time of the host that issues the event."""
    made_by_E: NDArray[np.int64]
    """Index into :attr:`Tables.ops`: the operator that made the block."""
    origin_E: NDArray[np.int64]
    """Index into :attr:`Tables.origins`; :data:`NOBODY` for workspaces of libraries."""
    label_E: NDArray[np.int64]
    stream_E: NDArray[np.int64]
    owner_E: NDArray[np.int64]
    """Index into :attr:`Tables.owners`, for allocations with a known owner; else :data:`NOBODY`."""
    block_address_B: NDArray[np.int64]
    block_size_B: NDArray[np.int64]
    block_requested_B: NDArray[np.int64]
    block_stream_B: NDArray[np.int64]
    block_flags_B: NDArray[np.int64]
    """Bits: 1 allocated, 2 in the small pool, 4 first of its segment."""
    block_made_by_B: NDArray[np.int64]

    @property
    def n_events(self) -> int:
        """Number of events."""
        return len(self.action_E)

    @cached_property
    def freed_E(self) -> NDArray[np.int64]:
        """For each allocation, the event at which its owner frees it.

        This is :attr:`n_events` where it is never freed, and for events that are no allocation.
        """
        freed_E = np.full(self.n_events, self.n_events, dtype=np.int64)
        (events,) = np.nonzero(self.action_E <= Action.FREE_REQUESTED)
        order = events[np.argsort(self.address_E[events], kind="stable")]
        first, then = order[:-1], order[1:]
        is_pair = (
            (self.address_E[first] == self.address_E[then])
            & (self.action_E[first] == Action.ALLOC)
            & (self.action_E[then] == Action.FREE_REQUESTED)
        )
        freed_E[first[is_pair]] = then[is_pair]
        return freed_E

    @cached_property
    def allocated_bytes_E(self) -> NDArray[np.int64]:
        """Allocated bytes after each event."""
        change_E = np.where(self.action_E == Action.ALLOC, self.block_bytes_E, 0)
        change_E -= np.where(self.action_E == Action.FREE_REQUESTED, self.block_bytes_E, 0)
        return np.cumsum(change_E)

    @cached_property
    def reserved_bytes_E(self) -> NDArray[np.int64]:
        """Bytes that the allocator holds after each event."""
        grows = (self.action_E == Action.SEGMENT_ALLOC) | (self.action_E == Action.SEGMENT_MAP)
        shrinks = (self.action_E == Action.SEGMENT_FREE) | (self.action_E == Action.SEGMENT_UNMAP)
        return np.cumsum(np.where(grows, self.bytes_E, 0) - np.where(shrinks, self.bytes_E, 0))

    @cached_property
    def active_bytes_E(self) -> NDArray[np.int64]:
        """Bytes that are allocated, or still in use on some stream, after each event."""
        change_E = np.where(self.action_E == Action.ALLOC, self.block_bytes_E, 0)
        change_E -= np.where(self.action_E == Action.FREE_COMPLETED, self.block_bytes_E, 0)
        return np.cumsum(change_E)

    @property
    def peak(self) -> int:
        """The event after which most bytes are allocated; 0 where the log is empty."""
        return int(np.argmax(self.allocated_bytes_E)) if self.n_events else 0

    def step_of(self, event: int) -> int:
        """Return the step in which an event lies, counted from 0."""
        return int(self.steps_of(np.array(event)))

    def steps_of(self, events: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the step of each event, counted from 0."""
        return np.searchsorted(self.step_starts, events, side="right") - 1

    def alive(self, event: int) -> NDArray[np.int64]:
        """Return the allocations that are still held just after ``event``, in order."""
        upto = slice(0, event + 1)
        (events,) = np.nonzero(self.action_E[upto] == Action.ALLOC)
        return events[self.freed_E[events] > event]

    def label(self, event: int) -> str:
        """Return the phase of the program at an event; empty beyond the last event."""
        if event >= self.n_events:
            return ""
        return self.tables.labels[int(self.label_E[event])]


_EVENTS = tuple(f.name for f in fields(MemoryLog) if f.name.endswith("_E"))
_BLOCKS = tuple(f.name for f in fields(MemoryLog) if f.name.endswith("_B"))
_SCHEMA = schema_of(**{name: integers(64) for name in (*_EVENTS, *_BLOCKS)})


def save_memory_log(log: MemoryLog, path: Path) -> None:
    """Write ``log``. Raises :class:`StorageError`."""
    columns = {}
    for name in _SCHEMA.names:
        values = getattr(log, name)
        columns[name] = list_column(np.array([0, len(values)]), values, _SCHEMA.field(name).type)
    header: dict[str, Any] = {
        "rank": log.rank,
        "step_starts": list(log.step_starts),
        "ops": list(log.tables.ops),
        "labels": list(log.tables.labels),
        "origins": [[o.site, o.module, int(o.is_unsharding)] for o in log.tables.origins],
        "owners": [list(owner) for owner in log.tables.owners],
    }
    write_table(path, pa.table(columns, schema=_SCHEMA), kind=KIND, header=header)


def load_memory_log(path: Path) -> MemoryLog:
    """Read what :func:`save_memory_log` wrote.

    Raises:
        UsageError: the file is missing. FormatError: it is damaged, foreign, or of another version.
    """
    table, header = read_table(path, _SCHEMA, kind=KIND)
    columns = {}
    for name in _SCHEMA.names:
        starts, values = lists(table, name)
        if len(starts) != 2:
            raise FormatError(f"{path}: column {name} must be one list; make it again")
        columns[name] = np.array(values)
    tables = Tables(
        ops=header.texts("ops"),
        origins=tuple(
            Origin(site, module, bool(flag))
            for site, module, flag in header.rows("origins", (str, str, int))
        ),
        labels=header.texts("labels"),
        owners=tuple((kind, name) for kind, name in header.rows("owners", (str, str))),
    )
    log = MemoryLog(
        rank=header.integer("rank", 0, MAX_WORLD_SIZE),
        tables=tables,
        step_starts=header.integers("step_starts", 0, MAX_VALUES),
        **columns,
    )
    _check(path, log)
    return log


def _check(path: Path, log: MemoryLog) -> None:
    for names in (_EVENTS, _BLOCKS):
        if len({len(getattr(log, name)) for name in names}) != 1:
            raise FormatError(f"{path}: columns {', '.join(names)} differ in length")
    tables = log.tables
    ranges = {
        "action_E": (0, len(Action)),
        "made_by_E": (0, len(tables.ops)),
        "block_made_by_B": (0, len(tables.ops)),
        "origin_E": (NOBODY, len(tables.origins)),
        "label_E": (0, len(tables.labels)),
        "owner_E": (NOBODY, len(tables.owners)),
        "bytes_E": (0, 2**50),
        "block_bytes_E": (0, 2**50),
    }
    for name, (low, high) in ranges.items():
        values = getattr(log, name)
        if len(values) and not (low <= values.min() and values.max() < high):
            raise FormatError(f"{path}: {name} has numbers outside {low} … {high - 1}")
