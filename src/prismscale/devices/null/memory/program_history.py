"""The memory history that a program itself records through ``torch.cuda.memory``.

The functions are ``_record_memory_history``, ``_snapshot`` and ``_dump_snapshot``.
"""

from __future__ import annotations

import ctypes
from typing import Any

from prismscale.devices.null.memory import memory_stats
from prismscale.devices.null.memory.memory_history import MemoryHistory
from prismscale.formats.memory_snapshot import Frames, trace

MOST_ENTRIES = 1_000_000


class ProgramHistory:
    """Implementations of the C functions behind ``torch.cuda.memory``'s history."""

    def __init__(self, library: ctypes.PyDLL, history: MemoryHistory, devices: int) -> None:
        self._library, self._history, self._devices = library, history, devices
        self._first: int | None = None
        """First event that the program records; None: it does not record."""
        self._most = MOST_ENTRIES

    def record(
        self,
        enabled: str | bool | None,
        context: str | None = None,
        stacks: str = "python",
        max_entries: int = MOST_ENTRIES,
        clear_history: bool = False,
        *_: Any,
        **__: Any,
    ) -> None:
        """Implement ``_cuda_record_memory_history``; ``enabled`` is None, ``state`` or ``all``."""
        self._most = min(int(max_entries), MOST_ENTRIES)
        self._history.record_stacks(bool(enabled) and context is not None)
        if not enabled:
            self._first = None
        elif self._first is None or clear_history:
            self._first = self._history.position()

    def record_legacy(self, enabled: bool, with_stack: bool = True, most: int = 1, *_: Any) -> None:
        """Implement ``torch._C._cuda_record_memory_history_legacy``."""
        self.record(enabled or None, "all" if with_stack else None, "python", most)

    def snapshot(self, which: Any = None) -> dict[str, Any]:
        """Implement ``torch._C._cuda_memorySnapshot``."""
        found = memory_stats.snapshot(self._library, self._devices, which and which[:2])
        traces: list[list[dict[str, Any]]] = [[] for _ in range(self._devices)]
        if self._first is not None:
            log = self._history.log(0, ())
            device = int(self._library.ps_current_device())
            first = max(self._first, log.n_events - self._most)
            traces[device] = trace(log, lambda event: self._frames(int(log.origin_E[event])), first)
            made = {int(log.address_E[e]): e for e in log.alive(log.n_events - 1).tolist()}
            for block in (b for s in found["segments"] for b in s["blocks"]):
                event = made.get(block["address"])
                if event is not None and block["state"] != "inactive":
                    block["frames"] = self._frames(int(log.origin_E[event]))
        return found | {"device_traces": traces}

    def _frames(self, origin: int) -> Frames:
        return [
            {"filename": filename, "line": line, "name": name}
            for filename, line, name in self._history.stack(origin)
        ]
