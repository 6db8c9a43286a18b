"""Which core a rank has to itself in a bench, and what holds it between steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gated_rank import GATE
from prismscale.capture.capture_spec import CaptureSpec
from prismscale.errors import PrismscaleError
from prismscale.live.live_spec import LiveSpec
from prismscale.processes.children import Child, Children, Program
from prismscale.processes.starter import cores

GATED_RANK = Path(__file__).with_name("gated_rank.py")


@dataclass(frozen=True)
class Prefixed:
    """Starts processes behind other words: a core, a CPU quota. See :class:`Starter`."""

    prefix: Callable[[int], Sequence[str]]
    """Of the rank in a slot."""
    gate: Path | None = None
    """Socket of a keeper that lets the steps of live ranks begin."""
    slots: int = field(default_factory=cores)
    """Ranks that are captured side by side."""

    def has_room(self) -> bool:
        """See :class:`Starter`."""
        return True

    def start(self, children: Children, program: Program) -> Child:
        """Start ``program`` among ``children``.

        Raises:
            PrismscaleError: a rank is to be captured beside others that are timed.
        """
        words = () if program.slot is None else self.prefix(program.slot)
        target = ["-m", program.module]
        if self.gate is not None and program.module == CaptureSpec.PROCESS:
            raise PrismscaleError(f"captures are not reused: {program.name} is captured again")
        if self.gate is not None and program.module == LiveSpec.PROCESS:
            words = [*words, "env", f"{GATE}={self.gate}"]
            target = [str(GATED_RANK)]
        command = [*words, sys.executable, *target, *program.arguments]
        return children.start(program.name, command, program.log)


def on_core(rank: int) -> list[str]:
    """Words before a command that keep a rank, with all its threads, on a core of its own: a rank's
    real and emulated steps then meet the same moods of the same core."""
    return ["taskset", "-c", str(sorted(os.sched_getaffinity(0))[rank])]


@dataclass(frozen=True)
class PinnedStarter:
    """Starts a live rank and its coordinator on the rank's core: beside another job's live rank a
    coordinator would take what nobody takes there in a job of its own."""

    rank: int
    gate: Path
    slots: int = field(default_factory=cores)
    """As many as where the ranks were captured, or slices that were timed there are not looked for
    here."""

    def has_room(self) -> bool:
        """See :class:`Starter`."""
        return True

    def start(self, children: Children, program: Program) -> Child:
        """See :class:`Starter`."""
        starter = Prefixed(lambda slot: on_core(self.rank), gate=self.gate)
        return starter.start(children, replace(program, slot=self.rank))
