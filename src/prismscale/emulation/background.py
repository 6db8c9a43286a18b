"""Communications beside training: asynchronous checkpoints, metrics of a helper thread.

A thread or process that writes a checkpoint agrees with its peers through communications of its
own, on the host and in its own time. So does a thread to which a GPU program hands its bookkeeping
(OLMo-core reduces metrics this way). Their timing is a matter of chance, and no step waits for
them. They are therefore answered at once and appear in no trace: a captured rank does not record
them, and a live rank does not expect them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed import Work

from prismscale.emulation.hook import Collective, CommunicationHook
from prismscale.emulation.work import completed

_here = threading.local()


def is_background() -> bool:
    """Whether this thread writes a checkpoint for which the program does not wait."""
    return getattr(_here, "depth", 0) > 0


@contextmanager
def in_background() -> Iterator[None]:
    """Mark what this thread does in the block as background work, part of no training step."""
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        _here.depth -= 1


class BackgroundAnswers:
    """Passes the program's communications on and answers background communications itself."""

    def __init__(self, hook: CommunicationHook, fill: Callable[[Collective], None]) -> None:
        """``fill`` defines a communication's outputs as if peers did what this rank does."""
        self._hook = hook
        self._fill = fill
        self._program: threading.Thread | None = None

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """Answer a background batch at once, unrecorded; pass any other batch on."""
        if not (is_background() or self._is_bookkeeping(batch)):
            return self._hook.communicate(batch)
        for collective in batch:
            self._fill(collective)
        return completed(tuple(t for c in batch for t in c.outputs))

    def _is_bookkeeping(self, batch: Sequence[Collective]) -> bool:
        """Whether a helper thread of a GPU program communicates host tensors.

        The program's own thread is the first that communicates; it need not be the main thread.
        """
        caller = threading.current_thread()
        if self._program is None:
            self._program = caller
        # Autograd's threads, which Python did not start, do the program's own work.
        is_helper = caller is not self._program and not isinstance(caller, threading._DummyThread)
        return is_helper and torch.accelerator.is_available() and all(map(_is_on_host, batch))


def _is_on_host(collective: Collective) -> bool:
    tensors = (*collective.inputs, *collective.outputs)
    if not tensors:  # a barrier
        return collective.group.backend == "gloo"
    return all(tensor.device.type == "cpu" for tensor in tensors)
