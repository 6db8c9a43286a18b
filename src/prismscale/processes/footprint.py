"""The memory that a run itself needs: the peak of this process and all its children together."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import psutil

INTERVAL_S = 0.25
REST = 300
"""Ratio of the pause between looks to a look's duration: a third of a per cent of one core."""


class Footprint:
    """Samples memory in the background while its context is open."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Footprint:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        ours = psutil.Process()
        while True:
            began = time.thread_time()
            self.peak_bytes = max(self.peak_bytes, _family_bytes(ours))
            took_s = time.thread_time() - began
            # Ranks that are timed may need every core, so looking must not slow them down.
            if self._ended.wait(max(INTERVAL_S, took_s * REST)):
                return


def _family_bytes(process: psutil.Process) -> int:
    """Proportional set size of a process and its children: pages that they share count once."""
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return total
