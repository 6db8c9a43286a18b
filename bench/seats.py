"""Which core a rank has to itself in a bench."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from prismscale.processes.children import Child, Children, Program
from prismscale.processes.starter import Spawner


def on_core(rank: int) -> list[str]:
    """Words before a command that keep a rank, with all its threads, on a core of its own: a rank's
    real and emulated steps then meet the same moods of the same core."""
    return ["taskset", "-c", str(sorted(os.sched_getaffinity(0))[rank])]


@dataclass(frozen=True)
class Seat:
    """Starts a live rank and its coordinator on the rank's core: beside another job's live rank a
    coordinator would take what nobody takes there in a job of its own."""

    rank: int

    def start(self, children: Children, program: Program) -> Child:
        """See :class:`Starter`."""
        spawner = Spawner(prefix=lambda slot: on_core(self.rank))
        return spawner.start(children, replace(program, slot=self.rank))
