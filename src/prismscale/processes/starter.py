"""How a process of a job comes to be: anew, or as a fork (:mod:`.fork_server`)."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Protocol

from prismscale.processes.children import Child, Children, Program


class Starter(Protocol):
    """Starts ranks, and what they run against."""

    @property
    def slots(self) -> int:
        """How many ranks have a place of their own, side by side: a core, or a machine."""

    def has_room(self) -> bool:
        """Whether one more may start now, as far as others on this machine are concerned."""

    def start(self, children: Children, program: Program) -> Child:
        """Start ``program`` among ``children``."""


@dataclass(frozen=True, kw_only=True)
class Spawner:
    """Starts a new interpreter for each process."""

    attached: bool = False
    """The process has this one's own input and output."""

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
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))
