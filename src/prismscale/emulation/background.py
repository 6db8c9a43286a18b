"""What a program does beside its training: asynchronous checkpoints.

A thread or process that writes a checkpoint agrees with its peers over communications of its own,
on the host and in its own time. When they happen is a matter of chance, and no step waits for them.
They are therefore answered at once and are in no trace: a captured rank does not record them, and a
live rank does not look for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.distributed import Work

from prismscale.emulation.hook import Collective, CommunicationHook
from prismscale.emulation.work import completed

_here = threading.local()


def is_background() -> bool:
    """Whether this thread writes a checkpoint for which the program does not wait."""
    return getattr(_here, "depth", 0) > 0


@contextmanager
def in_background() -> Iterator[None]:
    """What this thread does meanwhile is none of the program's steps."""
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        _here.depth -= 1


class BackgroundAnswers:
    """Passes the program's communications on; answers those in the background itself."""

    def __init__(self, hook: CommunicationHook, fill: Callable[[Collective], None]) -> None:
        """``fill`` defines a communication's outputs, as if peers did what this rank does."""
        self._hook = hook
        self._fill = fill

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """Nobody records what happens in the background."""
        if not is_background():
            return self._hook.communicate(batch)
        for collective in batch:
            self._fill(collective)
        return completed(tuple(t for c in batch for t in c.outputs))
