"""Finds training steps without being told: optimizer steps, and the period in which they repeat.

A program may call several optimizers in a step, or one; it may warm up differently (DDP rebuilds
its buckets after the first step, FSDP initialises lazily). A step is therefore the shortest run of
optimizer calls whose communication repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from prismscale.capture.stream import NodeStream
from prismscale.errors import UsageError

MAX_OPTIMIZERS = 16
"""Optimizer calls that one step may hold."""


class StepListener(Protocol):
    """Told about optimizer calls."""

    def optimizer_begins(self) -> None:
        """An optimizer is about to update parameters."""
        ...

    def optimizer_ended(self) -> None:
        """An optimizer has updated parameters: perhaps the end of a step."""
        ...


@contextmanager
def watch_steps(listener: StepListener, marker: str | None = None) -> Iterator[None]:
    """Tell ``listener`` about each optimizer call, or about each return of ``marker``.

    Args:
        listener: who is told.
        marker: ``module:function`` that the program calls once a step, in place of optimizers.

    Raises:
        UsageError: a marker that cannot be found.
    """
    if marker is not None:
        undo = _wrap_marker(listener, marker)
        try:
            yield
        finally:
            undo()
        return
    before = register_optimizer_step_pre_hook(lambda *_: listener.optimizer_begins())
    after = register_optimizer_step_post_hook(lambda *_: listener.optimizer_ended())
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _wrap_marker(listener: StepListener, marker: str) -> Callable[[], None]:
    module_name, _, function_name = marker.partition(":")
    try:
        owner: Any = import_module(module_name)
        *path, last = function_name.split(".")
        for part in path:
            owner = getattr(owner, part)
        original = getattr(owner, last)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"--step-marker {marker!r} cannot be found ({error}); give module:function or "
            "module:Class.method, importable from the script's folder"
        ) from error

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        listener.optimizer_ended()
        return result

    setattr(owner, last, wrapped)
    return lambda: setattr(owner, last, original)


def find_period(signatures: Sequence[str], repeats: int) -> int | None:
    """Shortest period in which the last segments repeat ``repeats`` times, or None.

    Args:
        signatures: what happened between consecutive optimizer calls, oldest first.
        repeats: how often the period must have been seen, back to back, up to the end.
    """
    for period in range(1, min(MAX_OPTIMIZERS, len(signatures) // repeats) + 1):
        if _times_seen(signatures, period, repeats) == repeats:
            return period
    return None


def find_steady(stream: NodeStream, repeats: int, since: int = 0) -> int | None:
    """Shortest period in which ``stream`` repeats ``repeats`` times since a mark, or None.

    A segment's signature names some predecessors by their place on a lane. Their distance is that
    of every later step only if all that lies between repeats as well, so it must have been seen to.
    """
    period = find_period(stream.signatures[since:], repeats)
    if period is None:
        return None
    reach = min(stream.reaches[-period:])
    before = sum(mark > reach for mark in stream.marks[:-period])
    needed = 1 + -(-before // period)
    return period if _times_seen(stream.signatures, period, needed) == needed else None


def _times_seen(signatures: Sequence[str], period: int, at_most: int) -> int:
    tail = signatures[-period:]
    for k in range(1, at_most):
        stop = len(signatures) - k * period
        if stop < period or signatures[stop - period : stop] != tail:
            return k
    return at_most
