"""Follows the memory of a null device, block by block: when it was taken and given back, by whom,
and what it was. See :mod:`prismscale.analysis.memory.memory_log`."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
from torch import nn

from prismscale.analysis.memory.memory_log import NOBODY, Action, MemoryLog, Origin, Tables
from prismscale.cost.kernel_signature import FIELD
from prismscale.devices.null.bindings import MEMORY_ROW, ORIGIN_CALLBACK
from prismscale.devices.null.memory import memory_stats
from prismscale.devices.null.memory.memory_owners import Owner, ProgramObjects
from prismscale.emulation.call_site import line_of, users_frame

LEAST_BYTES = 1 << 20
"""Of blocks whose origin is looked for: looking takes some 10 µs."""
MOST_EVENTS = 6_000_000
"""Events after which a rank's memory is no longer written down: half a gigabyte."""
_CALL = nn.Module._call_impl.__code__
_FULLY_SHARD = "torch/distributed/fsdp/_fully_shard"
_MOST_FRAMES = 100
Stack = tuple[tuple[str, int, str], ...]
"""File, line and function."""


class _Origins:
    """Who asks for memory, numbered; 0 is nobody."""

    def __init__(self) -> None:
        self.with_stacks = False
        self._known: dict[tuple[str, int, bool, Stack], int] = {}
        self._modules: dict[int, weakref.ref[nn.Module]] = {}

    def note(self, n_bytes: int) -> int:
        """The number of who asks now. Never raises: the allocator cannot."""
        try:
            return self._number(sys._getframe(1))
        except Exception:
            return 0

    def _number(self, frame: Any) -> int:
        asker = users_frame(frame)
        module, unshards = 0, False
        for _ in range(_MOST_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            unshards = unshards or _FULLY_SHARD in code.co_filename
            if code is _CALL:
                found = frame.f_locals["self"]
                module = id(found)
                self._modules.setdefault(module, weakref.ref(found))
                break
            frame = frame.f_back
        site = line_of(asker) if asker is not None else ""
        stack = _stack_of(asker) if self.with_stacks else ()
        return self._known.setdefault((site, module, unshards, stack), len(self._known) + 1)

    def stacks(self) -> list[Stack]:
        """By number."""
        return [(), *(stack for *_, stack in self._known)]

    def table(self, names: dict[int, str]) -> tuple[Origin, ...]:
        """By number; ``names`` are those of modules."""
        rows = [Origin("", "", False)]
        for site, module, unshards, _ in self._known:
            alive = module in self._modules and self._modules[module]() is not None
            rows.append(Origin(site, names.get(module, "") if alive else "", unshards))
        return tuple(rows)


def _stack_of(frame: FrameType | None) -> Stack:
    """Innermost first, as torch's snapshots have it."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


class MemoryHistory:
    """Of the device that the program uses. Two may want it: we, from the program's start until its
    memory has settled, and the program, whenever it says so."""

    def __init__(self, library: ctypes.PyDLL, devices: int) -> None:
        self._library = library
        self._devices = devices
        self._origins = _Origins()
        self._callback = ORIGIN_CALLBACK(self._origins.note)
        self._objects: ProgramObjects | None = None
        self._rows: list[np.ndarray[Any, Any]] = []
        self._n_rows = 0
        self._last = 0
        """Events while we followed."""
        self._step_starts = [0]
        self._seen: list[tuple[int, dict[int, Owner]]] = []
        """What blocks were, and how many events there had been."""
        self._blocks: list[Any] = []
        self._is_on = False
        self._is_followed = False

    def start(self) -> None:
        """From the program's first line on."""
        self._is_followed = True
        self._set()

    def record_stacks(self, on: bool) -> None:
        """Whether the program wants to know who asks for every block, however small."""
        self._origins.with_stacks = on
        self._set()

    def position(self) -> int:
        """How many events there were; from here on they are written down."""
        if not self._is_on:
            self._record(True)
        self._drain()
        return self._n_rows

    def stack(self, origin: int) -> Stack:
        """Frames of who asked, innermost first; empty where nobody looked."""
        stacks = self._origins.stacks()
        return stacks[origin] if 0 <= origin < len(stacks) else ()

    def _set(self) -> None:
        is_asked = self._is_followed or self._origins.with_stacks
        pointer = ctypes.cast(self._callback, ctypes.c_void_p) if is_asked else None
        self._library.ps_set_origin(pointer, 1 if self._origins.with_stacks else LEAST_BYTES)
        if is_asked and not self._is_on:
            self._record(True)

    def look(self) -> None:
        """What are the blocks that are held now?"""
        if not self._is_followed:
            return
        self._drain()
        if not self._objects:
            self._objects = ProgramObjects()
        self._seen.append((self._n_rows, self._objects.owners()))

    def step_ended(self) -> None:
        """A step begins."""
        self.look()
        self._step_starts.append(self._n_rows)

    def followed_log(self, rank: int, labels: Sequence[str]) -> MemoryLog:
        """Until we stopped following."""
        return self.log(rank, labels, self._last)

    def stop(self) -> None:
        """We follow nothing from here on; the program may."""
        if not self._is_followed:
            return
        self._is_followed = False
        self._drain()
        self._last = self._n_rows
        self._blocks = memory_stats.read_blocks(self._library, self._device)
        self._set()
        if not self._origins.with_stacks:
            self._record(False)

    @property
    def _device(self) -> int:
        return int(self._library.ps_current_device())

    def _record(self, on: bool) -> None:
        self._is_on = on
        for device in range(self._devices):
            self._library.ps_record_memory(device, int(on))

    def _drain(self) -> None:
        count = self._library.ps_memory_rows(self._device, None, -1)
        rows = np.empty(count, dtype=MEMORY_ROW)
        self._library.ps_memory_rows(self._device, rows.ctypes.data, count)
        self._rows.append(rows)
        self._n_rows += count
        if self._n_rows > MOST_EVENTS:
            self._record(False)

    def log(self, rank: int, labels: Sequence[str], stop: int | None = None) -> MemoryLog:
        """Everything that was seen of ``rank``, up to event ``stop``; ``labels`` are those of its
        spans."""
        self._drain()
        rows = np.concatenate([np.empty(0, dtype=MEMORY_ROW), *self._rows])[:stop]
        ops, (made_by_E, block_made_by_B) = self._ops(rows)
        owners, owner_E = self._owners(rows)
        names = self._objects.module_names() if self._objects else {}
        columns = {
            f"{name}_E": rows[name].astype(np.int64)
            for name in ("action", "address", "bytes", "block_bytes", "time_ns", "origin", "label")
        }
        blocks = [b for b in self._blocks if b.mapped]
        return MemoryLog(
            rank=rank,
            tables=Tables(
                ops=ops, origins=self._origins.table(names), labels=tuple(labels), owners=owners
            ),
            step_starts=tuple(self._step_starts[:-1]) or (0,),
            stream_E=rows["stream"].astype(np.int64),
            made_by_E=made_by_E,
            owner_E=owner_E,
            block_address_B=_column(b.address for b in blocks),
            block_size_B=_column(b.size_bytes for b in blocks),
            block_requested_B=_column(b.requested_bytes for b in blocks),
            block_stream_B=_column(b.stream for b in blocks),
            block_flags_B=_column(
                b.allocated | b.is_small << 1 | b.starts_segment << 2 for b in blocks
            ),
            block_made_by_B=block_made_by_B,
            **columns,
        )

    def _ops(self, rows: Any) -> tuple[tuple[str, ...], tuple[Any, Any]]:
        """Operators that allocate, and which of them made each block."""
        of_blocks = _column(b.made_by for b in self._blocks if b.mapped)
        used, place = np.unique(
            np.concatenate([rows["made_by"].astype(np.int64), of_blocks]), return_inverse=True
        )
        names = [self._library.ps_signature(s).decode() for s in used.tolist()]
        shown = [_operator(name) for name in names]
        ops = tuple(dict.fromkeys(shown))
        number_S = np.array([ops.index(name) for name in shown], dtype=np.int64)
        made_by = number_S[place.reshape(-1)] if len(used) else place.astype(np.int64)
        return ops, (made_by[: len(rows)], made_by[len(rows) :])

    def _owners(self, rows: Any) -> tuple[tuple[tuple[str, str], ...], Any]:
        """What was seen of blocks, told to the allocation that made each."""
        owner_E = np.full(len(rows), NOBODY, dtype=np.int64)
        table: dict[Owner, int] = {}
        (made,) = np.nonzero(rows["action"] == Action.ALLOC)
        order = made[np.argsort(rows["address"][made], kind="stable")]
        addresses = rows["address"][order].astype(np.int64)
        for until, owners in self._seen:
            for address, owner in owners.items():
                # Of an address's allocations so far, the last one is what is there.
                low, high = np.searchsorted(addresses, [address, address + 1])
                place = low + int(np.searchsorted(order[low:high], until)) - 1
                if place >= low:
                    owner_E[order[place]] = table.setdefault(owner, len(table))
        return tuple((owner.kind, owner.name) for owner in table), owner_E


def _operator(signature: str) -> str:
    return signature.partition(FIELD)[0]


def _column(values: Any) -> Any:
    return np.fromiter(values, dtype=np.int64)
