"""Classifies the allocated memory of a GPU by kind.

Kinds are parameters, gradients, optimizer state, activations by layer, temporaries and others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.analysis.memory.memory_log import NOBODY, MemoryLog, Origin

FORWARD, BACKWARD = "forward", "backward"
PARAMETERS = "parameters"
GRADIENTS = "gradients"
ACTIVATIONS = "activations"
KEPT = "kept across steps"
"""Blocks that outlive a step: DDP's gradient buckets, caches, what a program collects."""
UNSHARDED = "unsharded by FSDP"
TEMPORARIES = "temporaries"
WORKSPACES = "library workspaces"
KINDS = (
    PARAMETERS,
    GRADIENTS,
    "optimizer state",
    "buffers",
    ACTIVATIONS,
    KEPT,
    UNSHARDED,
    TEMPORARIES,
    WORKSPACES,
)
"""Kinds in display order. The first four are known from the program's objects."""
_LAYER = re.compile(r"(.*?(?:^|\.)\d+)(?:\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Total of the blocks of one kind at one place."""

    name: str
    """The place: a layer, or a line of the program."""
    n_bytes: int
    blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KindShare:
    """Memory of one kind."""

    kind: str
    n_bytes: int
    blocks: int
    places: tuple[Holder, ...] = ()
    """Totals by layer, largest first. Blocks that belong to no layer are left out."""
    sites: tuple[Holder, ...] = ()
    """Totals by line of the program, largest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLife:
    """One of the largest blocks at the peak."""

    n_bytes: int
    kind: str
    what: str
    """Name of the tensor, or the operator that made the block."""
    place: str
    site: str
    made_in: str
    """Phase (forward, backward, optimizer) and step; :attr:`freed_in` likewise."""
    freed_in: str
    life_ns: int | None
    """None where the block is never freed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPeak:
    """Memory of a rank at the moment when most bytes are allocated."""

    rank: int
    allocated_bytes: int
    requested_bytes: int
    """Allocated bytes as requested. The difference is rounding."""
    reserved_bytes: int
    """Most bytes that the allocator ever holds."""
    active_bytes: int
    """Most bytes that are ever allocated, or freed but still in use on some stream."""
    step: int
    """Step of the peak, counted from 1; 0 where nothing was allocated."""
    when: str
    """Phase of the program at the peak."""
    kinds: tuple[KindShare, ...] = ()
    largest: tuple[BlockLife, ...] = ()

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved bytes that are not allocated at the peak."""
        return self.reserved_bytes - self.allocated_bytes


def kinds_of(log: MemoryLog, events: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index into :data:`KINDS` of each allocation in ``events``."""
    tables = log.tables
    kind = np.full(len(events), KINDS.index(TEMPORARIES), dtype=np.int64)
    labels = np.array([*(label.split(",")[0] for label in tables.labels), ""])
    made_in = labels[log.label_E[events]]
    freed_in = labels[np.append(log.label_E, len(tables.labels))[log.freed_E[events]]]
    kind[(made_in == FORWARD) & (freed_in != FORWARD)] = KINDS.index(ACTIVATIONS)
    # A block that outlives two ends of steps belongs to no step; a program may hold its last loss
    # beyond one. Blocks that are never freed count as freed one step after the log's last.
    freed = log.freed_E[events]
    kept = log.steps_of(freed) + (freed == log.n_events) - log.steps_of(events) >= 2
    kind[(made_in == FORWARD) & kept] = KINDS.index(KEPT)
    # Blocks that one microbatch's backward pass leaves for the next are gradients that are not yet
    # reduced. Autograd makes them where no line of the program is known.
    forwards = np.cumsum(np.append(labels[log.label_E] == FORWARD, False))
    outlives = forwards[log.freed_E[events]] > forwards[events]
    kind[(made_in == BACKWARD) & (freed_in == BACKWARD) & outlives] = KINDS.index(GRADIENTS)
    unshards = np.array([*(o.is_unsharding for o in tables.origins), False])
    kind[unshards[log.origin_E[events]]] = KINDS.index(UNSHARDED)
    kind[log.origin_E[events] == NOBODY] = KINDS.index(WORKSPACES)
    # The index :data:`NOBODY`, -1, selects the last entry.
    owned = np.array([*(KINDS.index(k) for k, _ in tables.owners), NOBODY], dtype=np.int64)
    owner_kind = owned[log.owner_E[events]]
    return np.where(owner_kind == NOBODY, kind, owner_kind)


def memory_peak(log: MemoryLog, most: int = 12) -> MemoryPeak:
    """Analyse the moment of peak memory. At most ``most`` places and blocks are listed by name."""
    peak = log.peak
    events = log.alive(peak)
    kind = kinds_of(log, events)
    shares = (_share(log, name, events[kind == k], most) for k, name in enumerate(KINDS))
    order = np.argsort(-log.block_bytes_E[events], kind="stable")[:most]
    return MemoryPeak(
        rank=log.rank,
        allocated_bytes=int(log.allocated_bytes_E[peak]) if log.n_events else 0,
        requested_bytes=int(log.bytes_E[events].sum()),
        reserved_bytes=int(log.reserved_bytes_E.max(initial=0)),
        active_bytes=int(log.active_bytes_E.max(initial=0)),
        step=log.step_of(peak) + 1 if log.n_events else 0,
        when=log.label(peak).split(",")[0] or "initialisation",
        kinds=tuple(share for share in shares if share.n_bytes),
        largest=tuple(_life(log, int(events[i]), KINDS[int(kind[i])]) for i in order.tolist()),
    )


def _share(log: MemoryLog, kind: str, events: NDArray[np.int64], most: int) -> KindShare:
    return KindShare(
        kind=kind,
        n_bytes=int(log.block_bytes_E[events].sum()),
        blocks=len(events),
        places=_grouped(log, events, (_place(log, e) for e in events.tolist()), most),
        sites=_grouped(log, events, (_origin(log, e).site for e in events.tolist()), most),
    )


def _grouped(
    log: MemoryLog, events: NDArray[np.int64], names: Iterable[str], most: int
) -> tuple[Holder, ...]:
    held: dict[str, list[int]] = {}
    for name, n_bytes in zip(names, log.block_bytes_E[events].tolist(), strict=True):
        held.setdefault(name, []).append(n_bytes)
    rows = [Holder(name=n, n_bytes=sum(b), blocks=len(b)) for n, b in held.items() if n]
    return tuple(sorted(rows, key=lambda row: (-row.n_bytes, row.name))[:most])


def _origin(log: MemoryLog, event: int) -> Origin:
    number = int(log.origin_E[event])
    return Origin("", "", False) if number == NOBODY else log.tables.origins[number]


def _name(log: MemoryLog, event: int) -> str:
    """Return the block's name among the program's objects; empty where it has none."""
    owner = int(log.owner_E[event])
    return "" if owner == NOBODY else log.tables.owners[owner][1]


def _place(log: MemoryLog, event: int) -> str:
    """Return the layer that the block belongs to; empty for none."""
    name = _name(log, event).rpartition(" of ")[2]
    return layer_of(name or _origin(log, event).module)


def _life(log: MemoryLog, event: int, kind: str) -> BlockLife:
    freed = int(log.freed_E[event])
    lives = freed >= log.n_events
    return BlockLife(
        n_bytes=int(log.block_bytes_E[event]),
        kind=kind,
        what=_name(log, event) or log.tables.ops[int(log.made_by_E[event])],
        place=_place(log, event),
        site=_origin(log, event).site,
        made_in=_moment(log, event),
        freed_in="" if lives else _moment(log, freed),
        life_ns=None if lives else int(log.time_ns_E[freed] - log.time_ns_E[event]),
    )


def _moment(log: MemoryLog, event: int) -> str:
    doing = log.label(event).split(",")[0]
    return f"{doing or 'initialisation'}, step {log.step_of(event) + 1}"


def layer_of(name: str) -> str:
    """Return ``layers.3`` of ``layers.3.attention.wq``; without a number the first part."""
    found = _LAYER.match(name)
    return found[1] if found else name.partition(".")[0]
