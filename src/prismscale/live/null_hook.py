"""The hook of a live rank on a null device. The rank's logical time is the device's own time.

The rank arrives at a communication once the host has issued it and the current stream has come to
it. Waiting for it advances the current stream to its end. For a barrier or for tensors in host
memory, the host advances to that end too. The process itself blocks until the coordinator knows the
end. On a GPU the host would go on issuing work. Live ranks that rely on this would deadlock here:
each waits for a communication that the other one issues afterwards, on another group.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed import Work

from prismscale.emulation.backends.backend_order import blocks_host, is_in_host_memory, takes_host
from prismscale.emulation.hook import Collective
from prismscale.live.exchange import Exchange
from prismscale.live.hook_base import StepEnd
from prismscale.live.host_hook import LiveHook, Pending

POLL_NS = 1000
"""Host time of a query; ``Device::query`` in ``csrc/device.cpp`` takes the same."""
_POLL_S = 0.001
COMPUTING = 0
"""The default stream of a device, on which programs compute."""


class NullClock:
    """Logical time of a null device's current stream, counted from when this clock was made."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        self._origin_ns = self.host_ns()

    def host_ns(self) -> int:
        """Logical time of the host, counted from when the device was made."""
        return int(self._library.ps_host_time_ns())

    def now_ns(self) -> int:
        """Time at which work issued now would begin."""
        stream_ns = int(self._library.ps_stream_time_ns(*self._current()))
        return max(self.host_ns(), stream_ns) - self._origin_ns

    def wait_until(self, end_ns: int) -> None:
        """Let work issued from now on begin no earlier than ``end_ns``."""
        self._library.ps_advance_stream(*self._current(), end_ns + self._origin_ns)

    def block_host_until(self, end_ns: int) -> None:
        """Block the host until ``end_ns``, in logical time."""
        self._library.ps_host_waits_until(end_ns + self._origin_ns)

    def polled(self) -> None:
        """Let the host spend what a query takes: a loop that polls must come to an end."""
        self._library.ps_advance_host(POLL_NS)

    def communicates(self) -> None:
        """Let the host issue a communication to the current stream."""
        self._library.ps_communicates(*self._current())

    def forgive(self, lag_ns: int) -> None:
        """Do nothing: the emulation takes none of the device's time."""

    @contextmanager
    def without_cost(self) -> Iterator[None]:
        """Let this thread's work inside the context take none of the device's time."""
        self._library.ps_without_cost(1)
        try:
            yield
        finally:
            self._library.ps_without_cost(0)

    def before(self) -> None:
        """Let later work of the current stream begin after the computing stream's work so far."""
        device, _ = self._current()
        self._library.ps_advance_stream(
            *self._current(), self._library.ps_stream_time_ns(device, COMPUTING)
        )

    def after(self) -> None:
        """Let later work of the computing stream begin after the current stream's work so far."""
        device, _ = self._current()
        current_ns = self._library.ps_stream_time_ns(*self._current())
        self._library.ps_advance_stream(device, COMPUTING, current_ns)

    def _current(self) -> tuple[int, int]:
        device = self._library.ps_current_device()
        return device, self._library.ps_current_stream(device)


@dataclass(frozen=True, kw_only=True)
class HostExchange(Exchange):
    """An exchange of tensors in host memory only.

    Tensors on a null device have no bytes. Their communications are answered as among virtual
    peers, and take no memory on the way.
    """

    def peers(self, collective: Collective) -> list[int]:
        """Other live ranks that contribute bytes."""
        return super().peers(collective) if is_in_host_memory([collective]) else []


@dataclass(kw_only=True)
class NullLiveHook(LiveHook):
    """Answers a live rank's communications. The hook's own work takes no device time."""

    clock: NullClock

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """Answer as :class:`LiveHook` does, without taking device time.

        The host is busy with issuing it, as in a capture.
        """
        if takes_host(batch):
            self.clock.communicates()
        with self.clock.without_cost():
            return super().communicate(batch)

    def stretch(self) -> None:
        """Do nothing: the device's costs of a slow rank are higher already."""

    def step_ended(self) -> None:
        """Note the end of a steady step. The coordinator does not follow this machine's speed."""
        self._steps.append(StepEnd(self.clock.now_ns(), self.waited_ns, self.lag_ns))

    def _is_done(self, pending: Pending) -> bool:
        if super()._is_done(pending):
            return True
        if self._has_ends(pending):
            self.clock.polled()
        else:
            # Logical time stands still until the coordinator knows the end.
            self._read(_POLL_S)
        return False

    def _complete(self, pending: Pending, began: int) -> None:
        # Entered again, because the program itself calls the wait of an asynchronous call.
        with self.clock.without_cost():
            super()._complete(pending, began)
        if blocks_host(pending.batch):
            self.clock.block_host_until(self.clock.now_ns())
