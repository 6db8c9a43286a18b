"""How a process of a job comes to be: anew, or as a fork (:mod:`.fork_server`)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

from prismscale.processes.children import Child, Children, Program


class Starter(Protocol):
    """Starts ranks, and what they run against."""

    def start(self, children: Children, program: Program) -> Child:
        """Start ``program`` among ``children``."""


@dataclass(frozen=True, kw_only=True)
class Spawner:
    """Starts an interpreter for each."""

    attached: bool = False
    """The process has this one's own input and output."""

    def start(self, children: Children, program: Program) -> Child:
        """See :class:`Starter`."""
        command = [sys.executable, "-m", program.module, *program.arguments]
        return children.start(program.name, command, program.log, attached=self.attached)
