"""History of a null device's memory: when each block was allocated and freed, by whom and for what.

See :mod:`prismscale.analysis.memory.memory_log`.
"""

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
"""Smallest allocation whose origin is looked up; a look-up takes about 10 µs."""
MOST_EVENTS = 6_000_000
"""Number of events, half a gigabyte, after which a rank's history is no longer recorded."""
_CALL = nn.Module._call_impl.__code__
_FULLY_SHARD = "torch/distributed/fsdp/_fully_shard"
_MOST_FRAMES = 100
Stack = tuple[tuple[str, int, str], ...]
"""Frames as (file, line, function), innermost first."""


class _Origins:
    """Numbered table of the places in the program that allocate; 0 stands for an unknown one."""

    def __init__(self) -> None:
        self.with_stacks = False
        self._known: dict[tuple[str, int, bool, Stack], int] = {}
        self._modules: dict[int, weakref.ref[nn.Module]] = {}

    def note(self, n_bytes: int) -> int:
        """Return the number of the place that allocates now; 0 if looking it up fails.

        It never raises, because the allocator that calls it cannot.
        """
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
        """Return the stack of each origin, by its number."""
        return [(), *(stack for *_, stack in self._known)]

    def table(self, names: dict[int, str]) -> tuple[Origin, ...]:
        """Return the origins by number; ``names`` maps a module's ``id`` to its name."""
        rows = [Origin("", "", False)]
        for site, module, unshards, _ in self._known:
            alive = module in self._modules and self._modules[module]() is not None
            rows.append(Origin(site, names.get(module, "") if alive else "", unshards))
        return tuple(rows)


def _stack_of(frame: FrameType | None) -> Stack:
    """Return the frames from ``frame`` outwards, innermost first, as torch's snapshots do."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


class MemoryHistory:
    """Memory history of the device that the program uses.

    It has two users. prismscale follows the memory from the program's start until the memory has
    settled. The program may record whenever it likes.
    """

    def __init__(self, library: ctypes.PyDLL, devices: int) -> None:
        self._library = library
        self._devices = devices
        self._origins = _Origins()
        self._callback = ORIGIN_CALLBACK(self._origins.note)
        self._objects: ProgramObjects | None = None
        self._rows: list[np.ndarray[Any, Any]] = []
        self._n_rows = 0
        self._last = 0
        """Number of events up to the end of following."""
        self._step_starts = [0]
        self._seen: list[tuple[int, dict[int, Owner]]] = []
        """For each look: the number of events until then, and the owners of blocks by address."""
        self._blocks: list[Any] = []
        """Blocks at the end of following."""
        self._is_on = False
        """Whether the extension records events, for either user."""
        self._is_followed = False
        """Whether prismscale follows the memory."""

    def start(self) -> None:
        """Follow the memory from here on; called before the program's first line."""
        self._is_followed = True
        self._set()

    def record_stacks(self, on: bool) -> None:
        """Set whether the program wants a stack for every block, however small."""
        self._origins.with_stacks = on
        self._set()

    def position(self) -> int:
        """Return the number of events so far, and record events from here on."""
        if not self._is_on:
            self._record(True)
        self._drain()
        return self._n_rows

    def stack(self, origin: int) -> Stack:
        """Return the frames of an origin, innermost first; empty if no stack was taken."""
        stacks = self._origins.stacks()
        return stacks[origin] if 0 <= origin < len(stacks) else ()

    def _set(self) -> None:
        is_asked = self._is_followed or self._origins.with_stacks
        pointer = ctypes.cast(self._callback, ctypes.c_void_p) if is_asked else None
        self._library.ps_set_origin(pointer, 1 if self._origins.with_stacks else LEAST_BYTES)
        if is_asked and not self._is_on:
            self._record(True)

    def look(self) -> None:
        """Note what the blocks that are allocated now hold."""
        if not self._is_followed:
            return
        self._drain()
        if not self._objects:
            self._objects = ProgramObjects()
        self._seen.append((self._n_rows, self._objects.owners()))

    def step_ended(self) -> None:
        """Note the end of a step, where the next one begins."""
        self.look()
        self._step_starts.append(self._n_rows)

    def followed_log(self, rank: int, labels: Sequence[str]) -> MemoryLog:
        """Return the log of ``rank`` up to the end of following; see :meth:`log`."""
        return self.log(rank, labels, self._last)

    def stop(self) -> None:
        """End the following; what the program itself records goes on."""
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
        """Return the log of ``rank`` up to event ``stop``.

        ``labels``: labels of the rank's spans, by number. ``stop`` None: all events so far.
        """
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
        """Return the operators that allocate, and for each event and block which one made it."""
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
        """Return the owners, and for each event which one owns the block that it allocated.

        A look found an owner at an address. It is credited to the allocation behind this address.
        """
        owner_E = np.full(len(rows), NOBODY, dtype=np.int64)
        table: dict[Owner, int] = {}
        (made,) = np.nonzero(rows["action"] == Action.ALLOC)
        order = made[np.argsort(rows["address"][made], kind="stable")]
        addresses = rows["address"][order].astype(np.int64)
        for until, owners in self._seen:
            for address, owner in owners.items():
                # The last allocation at an address before the look is the block that was seen.
                low, high = np.searchsorted(addresses, [address, address + 1])
                place = low + int(np.searchsorted(order[low:high], until)) - 1
                if place >= low:
                    owner_E[order[place]] = table.setdefault(owner, len(table))
        return tuple((owner.kind, owner.name) for owner in table), owner_E


def _operator(signature: str) -> str:
    return signature.partition(FIELD)[0]


def _column(values: Any) -> Any:
    return np.fromiter(values, dtype=np.int64)
