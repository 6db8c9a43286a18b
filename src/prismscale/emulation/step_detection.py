"""Finds training steps without being told: hooks on every optimizer's step.

What makes a step of these calls: :mod:`prismscale.capture.step_kinds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from prismscale.emulation.hook import in_its_place
from prismscale.errors import UsageError


class StepListener(Protocol):
    """Told about optimizer calls."""

    def optimizer_begins(self) -> None:
        """An optimizer is about to update parameters."""
        ...

    def optimizer_ended(self, optimizer: int = 0) -> None:
        """An optimizer (named by a number) has updated parameters: perhaps the end of a step."""
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
    # An optimizer that is captured in a graph does its step at each replay.
    before = register_optimizer_step_pre_hook(lambda *_: in_its_place(listener.optimizer_begins))
    after = register_optimizer_step_post_hook(
        lambda optimizer, *_: in_its_place(partial(listener.optimizer_ended, id(optimizer)))
    )
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
