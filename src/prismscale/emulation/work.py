"""The handle of a communication that this process answers by itself.

Two kinds of code wait for a communication. Python code, functional collectives and FSDP call
``Work.wait()``, which reaches :meth:`EmulatedWork.wait` (through a trampoline when C++ calls it).
DDP's Reducer instead takes ``Work.get_future()`` inside the backward pass and waits for the future
in C++, which calls no Python method: a future that completes only when *Python* code waits for it
would block for ever. So a pending future is completed by whichever comes first:

* ``wait``, ``value`` or ``done`` of the future, of a future chained to it with ``then``, or
  ``wait`` of the work: at that moment, as a real wait would;
* if it was taken inside a backward pass, an autograd engine callback at the end of that pass. The
  Reducer queues its own finalising callback only after the last bucket's future was taken and the
  engine runs callbacks in the order in which they were queued, so ours runs immediately before the
  Reducer's wait: the wait is observed where it happens, and overlap with the backward pass is kept;
* if it was taken inside such a callback (the first step of a static graph, where the Reducer issues
  everything at the end and waits in the same callback): at once;
* ``torch.futures.collect_all`` and ``wait_all`` chain in C++ and never ask Python; these two are
  rebound by :mod:`prismscale.emulation.install` to :func:`collect_all` and :func:`wait_all`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed import Work

from prismscale.emulation.backends.backend_memory import handle_keeps_inputs
from prismscale.emulation.hook import Collective

OnWait = Callable[[timedelta | None], None]
_NO_TIMEOUT = timedelta(0)


class LazyFuture(torch.futures.Future[Any]):
    """A future that calls ``complete`` before a wait for it blocks."""

    def __init__(
        self,
        complete: Callable[[], None],
        is_done: Callable[[], bool] | None = None,
        devices: list[int | str | torch.device] | None = None,
    ) -> None:
        super().__init__(devices=devices)
        self._complete = complete
        self._is_done = is_done
        self._on_devices = devices

    def done(self) -> bool:
        """Return whether the value is there. Never blocks."""
        if not super().done() and (self._is_done is None or self._is_done()):
            self._complete()
        return super().done()

    def wait(self) -> Any:
        """Complete, then return the value."""
        self._complete()
        return super().wait()

    def value(self) -> Any:
        """Complete, then return the value."""
        self._complete()
        return super().value()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> LazyFuture:
        """Return a future of ``callback(self)``. A wait for it completes this future first."""
        child = LazyFuture(self._complete, self._is_done, self._on_devices)

        def run(_: torch.futures.Future[Any]) -> None:
            try:
                child.set_result(callback(self))
            except Exception as error:
                child.set_exception(error)

        self.add_done_callback(run)
        return child


class EmulatedWork(Work):
    """A communication in flight, or completed.

    ``outputs`` are the tensors of ``result()`` and of the future. The first wait calls
    ``on_wait(timeout)``, once; it returns when the communication has completed for this rank. It is
    None if nothing is left to wait for. ``is_done`` answers a poll without blocking; if it is None,
    a poll finds the communication completed. Several threads may wait, and all of them return when
    the communication has completed; a poll by one thread while another waits answers False.
    With ``poll_waits``, a poll that finds it completed waits: a program that polls may never wait,
    and reads the outputs then.
    ``inputs`` live until the wait or, with ``keeps_inputs``, as long as the handle. ``outputs``
    always live as long as the handle.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor] = (),
        on_wait: OnWait | None = None,
        is_done: Callable[[], bool] | None = None,
        source: int = -1,
        inputs: Sequence[torch.Tensor] = (),
        keeps_inputs: bool = False,
        poll_waits: bool = False,
    ) -> None:
        super().__init__()
        self._outputs = outputs
        self._inputs, self._keeps_inputs = inputs, keeps_inputs
        self._on_wait = on_wait
        self._is_done, self._poll_waits = is_done, poll_waits
        self._future: LazyFuture | None = None
        # Reentrant: ``on_wait`` may wait for the same handle.
        self._turn = threading.RLock()
        self._is_over = on_wait is None
        self.source = source
        """Group rank of the sender, for a receive from any source."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until the communication has completed for this rank; always True."""
        with self._turn:
            on_wait = self._on_wait
            if on_wait is not None:
                # Cleared first: a wait inside on_wait must not wait again.
                self._on_wait = None
                try:
                    on_wait(timeout if timeout > _NO_TIMEOUT else None)
                finally:
                    # Also if on_wait ends the program: nothing polls after that.
                    self._is_over = True
                # This frees what its closure holds.
                self._is_done = None
                if not self._keeps_inputs:
                    self._inputs = ()
            future = self._future
            if future is not None:
                self._future = None
                future.set_result(list(self._outputs))
        return True

    def is_completed(self) -> bool:
        """Return whether the communication has completed. Never blocks."""
        if self._is_over:
            return True
        # Another thread is in on_wait: the outputs are undefined until it returns.
        if self._on_wait is None:
            return False
        is_done = self._is_done
        if is_done is None:
            return True
        over = is_done()
        if over and self._poll_waits:
            self.wait()
        return over

    def is_success(self) -> bool:
        """Return whether it has completed: emulated communications do not fail."""
        return self.is_completed()

    def exception(self) -> None:
        """Return None: emulated communications do not fail."""
        return None

    def result(self) -> list[torch.Tensor]:
        """Wait for completion and return the output tensors."""
        self.wait()
        return list(self._outputs)

    def synchronize(self) -> None:
        """Order all later work after the communication."""
        self.wait()

    def block_current_stream(self) -> None:
        """Order later work on the current stream after the communication."""
        self.wait()

    def source_rank(self) -> int:
        """Return the group rank of the sender of a receive."""
        return self.source

    def _source_rank(self) -> int:
        return self.source

    def get_future(self) -> LazyFuture:
        """Return a future of the list of outputs; the module docstring says when it completes."""
        if self._future is not None:
            return self._future
        on_cuda = {t.device for t in self._outputs if t.device.type == "cuda"}
        devices: list[int | str | torch.device] = sorted(on_cuda, key=str)
        future = LazyFuture(self._complete, self._is_done, devices or None)
        if self._is_over:
            future.set_result(list(self._outputs))
            return future
        self._future = future
        if torch._C._current_graph_task_id() != -1:
            if torch._C._current_autograd_node() is None:
                self._complete()
            else:
                Variable._execution_engine.queue_callback(self._complete)
        return future

    def _complete(self) -> None:
        self.wait()


def completed(outputs: Sequence[torch.Tensor] = ()) -> EmulatedWork:
    """Return the handle of a communication that has already completed."""
    return EmulatedWork(outputs)


def in_flight(
    batch: Sequence[Collective],
    on_wait: OnWait,
    is_done: Callable[[], bool] | None = None,
    *,
    poll_waits: bool = True,
) -> EmulatedWork:
    """Return the handle of an asynchronous ``batch``; it holds what the backend keeps alive."""
    return EmulatedWork(
        tuple(t for c in batch for t in c.outputs),
        on_wait,
        is_done,
        inputs=tuple(t for c in batch for t in c.inputs),
        keeps_inputs=handle_keeps_inputs(batch),
        poll_waits=poll_waits,
    )


def collect_all(futures: list[torch.futures.Future[Any]]) -> LazyFuture:
    """``torch.futures.collect_all`` whose future completes its parts when it is waited for."""
    parts = list(futures)

    def complete() -> None:
        for part in parts:
            part.wait()
        gathered.set_result(parts)

    gathered = LazyFuture(_once(complete), lambda: all(part.done() for part in parts))
    return gathered


def wait_all(futures: list[torch.futures.Future[Any]]) -> list[Any]:
    """``torch.futures.wait_all`` that completes its parts."""
    return [future.wait() for future in futures]


def _once(function: Callable[[], None]) -> Callable[[], None]:
    pending = [function]

    def run() -> None:
        if pending:
            pending.pop()()

    return run
