"""What a program does beside its training: asynchronous checkpoints.

A thread or process that writes a checkpoint agrees with its peers over communications of its own,
on the host and in its own time. When they happen is a matter of chance, and no step waits for them.
They are therefore answered at once and are in no trace: a captured rank does not record them, and a
live rank does not look for them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
