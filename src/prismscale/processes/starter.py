"""How a process of a job is started: as a new interpreter, or as a fork (:mod:`.fork_server`)."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Protocol

from prismscale.processes.children import Child, Children, Program


class Starter(Protocol):
    """Starts ranks, and the other processes of a job."""

    @property
    def slots(self) -> int:
        """Number of ranks that can run side by side, each on its own place: a core or a machine."""

    def has_room(self) -> bool:
        """Whether other users of this machine leave room to start one more process now."""

    def start(self, children: Children, program: Program) -> Child:
        """Start ``program`` among ``children``."""


@dataclass(frozen=True, kw_only=True)
class Spawner:
    """Starts a new interpreter for each process."""

    attached: bool = False
    """Give the process this process's own input and output."""

    @property
    def slots(self) -> int:
        """See :class:`Starter`."""
        return cores()

    def has_room(self) -> bool:
        """See :class:`Starter`."""
        return True

    def start(self, children: Children, program: Program) -> Child:
        """See :class:`Starter`."""
        command = [sys.executable, "-m", program.module, *program.arguments]
        return children.start(program.name, command, program.log, attached=self.attached)


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
