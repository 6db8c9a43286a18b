"""What holds the memory of a GPU, by kind: parameters, gradients, optimizer state, activations by
layer, and what is gone again soon."""

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
"""DDP's buckets of gradients, caches, what a program collects."""
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
"""In the order in which people think of them; the first four are what the program's objects say."""
_LAYER = re.compile(r"(.*?(?:^|\.)\d+)(?:\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Blocks of one kind and place."""

    name: str
    """A layer, or a line of the program."""
    n_bytes: int
    blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KindShare:
    """What one kind holds."""

    kind: str
    n_bytes: int
    blocks: int
    places: tuple[Holder, ...] = ()
    """By layer, and, where no module was running, by line; largest first."""
    sites: tuple[Holder, ...] = ()
    """By line of the program, largest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLife:
    """One of the largest blocks at the peak."""

    n_bytes: int
    kind: str
    what: str
    """Its name, or the operator that made it."""
    place: str
    site: str
    made_in: str
    """Forward, backward, optimizer, and of which step; likewise the next."""
    freed_in: str
    life_ns: int | None
    """None: it lives on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPeak:
    """A rank's memory when most of it is allocated, and how it came to be reserved."""

    rank: int
    allocated_bytes: int
    requested_bytes: int
    """Of them, as asked for: the rest is rounding."""
    reserved_bytes: int
    """The most that the allocator ever holds."""
    active_bytes: int
    """The most that is allocated or still in use on some stream."""
    step: int
    """In which most is allocated, from 1; 0 is before the first step ends."""
    when: str
    """What the program does then."""
    kinds: tuple[KindShare, ...] = ()
    largest: tuple[BlockLife, ...] = ()

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved, and not allocated when most is."""
        return self.reserved_bytes - self.allocated_bytes


def kinds_of(log: MemoryLog, events: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index into :data:`KINDS` of each of some allocations."""
    tables = log.tables
    kind = np.full(len(events), KINDS.index(TEMPORARIES), dtype=np.int64)
    labels = np.array([*(label.split(",")[0] for label in tables.labels), ""])
    made_in = labels[log.label_E[events]]
    freed_in = labels[np.append(log.label_E, len(tables.labels))[log.freed_E[events]]]
    kind[(made_in == FORWARD) & (freed_in != FORWARD)] = KINDS.index(ACTIVATIONS)
    # Two ends of steps later it is no step's: a program may hold its last loss for one more.
    # What lives on when the log ends counts as of a step after its last.
    freed = log.freed_E[events]
    kept = log.steps_of(freed) + (freed == log.n_events) - log.steps_of(events) >= 2
    kind[(made_in == FORWARD) & kept] = KINDS.index(KEPT)
    # What one microbatch's backward pass leaves for the next one's: gradients that are not reduced
    # yet. Autograd makes them where no line of the program can be named.
    forwards = np.cumsum(np.append(labels[log.label_E] == FORWARD, False))
    outlives = forwards[log.freed_E[events]] > forwards[events]
    kind[(made_in == BACKWARD) & (freed_in == BACKWARD) & outlives] = KINDS.index(GRADIENTS)
    unshards = np.array([*(o.is_unsharding for o in tables.origins), False])
    kind[unshards[log.origin_E[events]]] = KINDS.index(UNSHARDED)
    kind[log.origin_E[events] == NOBODY] = KINDS.index(WORKSPACES)
    # Nobody's index, -1, is the last one.
    owned = np.array([*(KINDS.index(k) for k, _ in tables.owners), NOBODY], dtype=np.int64)
    owner_kind = owned[log.owner_E[events]]
    return np.where(owner_kind == NOBODY, kind, owner_kind)


def memory_peak(log: MemoryLog, most: int = 12) -> MemoryPeak:
    """What is held when most is allocated; ``most`` places and blocks are named one by one."""
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
    """What the program's objects call it; empty where they do not know it."""
    owner = int(log.owner_E[event])
    return "" if owner == NOBODY else log.tables.owners[owner][1]


def _place(log: MemoryLog, event: int) -> str:
    """The layer it belongs to; empty for none."""
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
    """``layers.3`` of ``layers.3.attention.wq``; without a number the first part."""
    found = _LAYER.match(name)
    return found[1] if found else name.partition(".")[0]
