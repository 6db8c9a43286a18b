"""Finds training steps and their phases without help from the program.

It hooks every optimizer's step, and the calls that begin a backward pass.
:mod:`prismscale.capture.step_kinds` decides which of these calls make up a step.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from prismscale.emulation.hook import in_its_place
from prismscale.errors import UsageError


class StepListener(Protocol):
    """Is notified of optimizer calls."""

    def optimizer_begins(self) -> None:
        """An optimizer is about to update parameters."""
        ...

    def optimizer_ended(self, optimizer: int = 0) -> None:
        """An optimizer (named by a number) has updated parameters: perhaps the end of a step."""
        ...


@contextmanager
def watch_steps(listener: StepListener, marker: str | None = None) -> Iterator[None]:
    """Notify ``listener`` of each optimizer call, or of each return of ``marker``.

    Args:
        listener: is notified.
        marker: ``module:function`` that the program calls once a step; replaces optimizer calls.

    Raises:
        UsageError: the marker cannot be found.
    """
    if marker is not None:
        undo = _wrap_marker(listener, marker)
        try:
            yield
        finally:
            undo()
        return
    # An optimizer that is captured in a CUDA graph does its step at each replay.
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


FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
"""Names of a step's phases in captures."""


class BackwardListener(Protocol):
    """Is notified of backward passes."""

    def backward_begins(self) -> None:
        """A backward pass is about to run."""
        ...

    def backward_ended(self) -> None:
        """The backward pass has run."""
        ...


@contextmanager
def watch_backward(listener: BackwardListener) -> Iterator[None]:
    """Notify ``listener`` of backward passes.

    Replaces the object through which Python code runs autograd's engine.
    ``torch.autograd.backward`` and ``grad`` use it, and so do programs that call the engine
    themselves (Megatron's pipelines, whose outputs have released their data). A pass that runs
    within another is part of it.
    """
    variable: Any = torch.autograd.Variable
    original = variable._execution_engine
    passes = _Passes(listener)
    delayed = _DelayedGradients(passes)

    # A process has one engine, whichever object calls it. Compilers check the object's type.
    class WatchedEngine(torch._C._ImperativeEngine):
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            """Run a backward pass, and note its beginning and its end."""
            delayed.watch()
            in_its_place(passes.begin)
            try:
                return original.run_backward(*args, **kwargs)
            finally:
                in_its_place(passes.end)

    variable._execution_engine = WatchedEngine()
    try:
        yield
    finally:
        variable._execution_engine = original
        delayed.leave()


class _Passes:
    """Counts the open backward passes. A nested one may run on one of autograd's threads."""

    def __init__(self, listener: BackwardListener) -> None:
        self._listener = listener
        self._open = 0

    def begin(self) -> None:
        self._open += 1
        if self._open == 1:
            self._listener.backward_begins()

    def end(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._listener.backward_ended()


_DELAYING_MODULE, _DELAYING_CLASS = "transformer_engine.pytorch.module._common", "WeightGradStore"


class _DelayedGradients:
    """Notes the computation of weight gradients that Transformer Engine's layers have delayed.

    The program asks for them outside autograd (Megatron's ``delay_wgrad_compute``); they count as
    backward passes, too. The library may be imported late, but it delays nothing before a backward
    pass has begun.
    """

    def __init__(self, passes: _Passes) -> None:
        self._passes = passes
        self._undo: Callable[[], None] | None = None

    def watch(self) -> None:
        """Replace the function that computes them, once the library is imported."""
        if self._undo is not None:
            return
        store: Any = getattr(sys.modules.get(_DELAYING_MODULE), _DELAYING_CLASS, None)
        if store is None:
            return
        original = store.pop
        passes = self._passes

        def pop(self: Any) -> Any:
            in_its_place(passes.begin)
            try:
                return original(self)
            finally:
                in_its_place(passes.end)

        store.pop = pop
        self._undo = partial(setattr, store, "pop", original)

    def leave(self) -> None:
        """Restore the function."""
        if self._undo is not None:
            self._undo()


class RecomputationListener(Protocol):
    """Is notified when a backward pass recomputes part of the forward pass."""

    def recomputation_begins(self) -> None:
        """From here on, this thread recomputes."""
        ...

    def recomputation_ended(self) -> None:
        """From here on, this thread runs the backward pass itself again."""
        ...


@contextmanager
def watch_recomputation(listener: RecomputationListener) -> Iterator[None]:
    """Notify ``listener`` of activation checkpointing, whichever library does it.

    Rebinds the methods that enter and leave ``torch.enable_grad``. Gradients are off while autograd
    runs a backward pass; code that recomputes a part of the forward pass there turns them on for
    it: ``torch.utils.checkpoint`` of both kinds, Megatron's and DeepSpeed's.
    """
    kind = torch.enable_grad
    enter, leave = kind.__enter__, kind.__exit__
    depth = threading.local()
    """Number of recomputations open on this thread. They nest where checkpointed layers contain
    others."""

    def entering(self: Any) -> None:
        enter(self)
        self.is_again = torch._C._current_graph_task_id() != -1
        if self.is_again:
            depth.open = getattr(depth, "open", 0) + 1
            if depth.open == 1:
                listener.recomputation_begins()

    def leaving(self: Any, *error: Any) -> None:
        if getattr(self, "is_again", False):
            self.is_again = False
            depth.open -= 1
            if depth.open == 0:
                listener.recomputation_ended()
        leave(self, *error)

    kind.__enter__, kind.__exit__ = entering, leaving  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave  # type: ignore[method-assign]
