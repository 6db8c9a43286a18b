"""Places to run that several processes share, so that together they start no more than there are.

Each place is a file in one folder, and the process that has locked the file has the place. A lock
ends with its process, however that ends, so no place is ever lost.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path

from prismscale.processes.children import Child, Children, Program
from prismscale.processes.starter import Starter


@dataclass(frozen=True, kw_only=True)
class SharedSlots:
    """``count`` places in ``folder``, which exists and is on this machine."""

    folder: Path
    count: int

    def take(self) -> int | None:
        """Take a place: return a descriptor that holds it until closed; None if all are taken."""
        for place in range(self.count):
            handle = os.open(self.folder / f"place-{place}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
            else:
                return handle
        return None


@dataclass(kw_only=True)
class SharingStarter:
    """Starts processes with another starter, each on its own shared place (a :class:`.Starter`)."""

    inner: Starter
    shared: SharedSlots
    _next: int | None = None
    _held: list[tuple[Child, int]] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """See :class:`.Starter`; here the number of all places."""
        return self.shared.count

    def has_room(self) -> bool:
        """See :class:`.Starter`."""
        self._give_back()
        if self._next is None:
            self._next = self.shared.take()
        return self._next is not None

    def start(self, children: Children, program: Program) -> Child:
        """See :class:`.Starter`; takes the place that :meth:`has_room` found."""
        child = self.inner.start(children, program)
        if self._next is not None:
            self._held.append((child, self._next))
            self._next = None
        return child

    def close(self) -> None:
        """Give every place back."""
        for _, handle in self._held:
            os.close(handle)
        self._held = []
        if self._next is not None:
            os.close(self._next)
            self._next = None

    def _give_back(self) -> None:
        ended = [held for held in self._held if held[0].process.returncode is not None]
        self._held = [held for held in self._held if held not in ended]
        for _, handle in ended:
            os.close(handle)
