"""How a process of a job comes to be: anew, or as a fork (:mod:`prismscale.fork_server`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prismscale.processes import Child, Children


class Starter(Protocol):
    """Starts ranks, and what they run against."""

    def start(
        self,
        children: Children,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        *,
        slot: int | None = None,
    ) -> Child:
        """Start ``python -m module arguments`` among ``children``, its output going to ``log``.

        ``slot`` numbers the ranks that run side by side from 0; what is not a rank has none.
        """


@dataclass(frozen=True, kw_only=True)
class Spawner:
    """Starts an interpreter for each."""

    prefix: Callable[[int], Sequence[str]] = lambda slot: ()
    """Words before the command of the rank in a slot, for a core or a CPU quota."""
    attached: bool = False
    """The process has this one's own input and output."""

    def start(
        self,
        children: Children,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        *,
        slot: int | None = None,
    ) -> Child:
        """See :class:`Starter`."""
        prefix = () if slot is None else self.prefix(slot)
        command = [*prefix, sys.executable, "-m", module, *arguments]
        return children.start(name, command, log, attached=self.attached)
