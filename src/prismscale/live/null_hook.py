"""A live rank on a device that is not there: its logical time is the device's own.

A communication is reached when both the host has issued it and the current stream has come to it.
Waiting for it moves the current stream, and for a barrier or the host's own memory the host too, to
its end. The process itself blocks there until the coordinator knows that end: on a GPU the host
would go on to issue work, so several live ranks that rely on this (each waits for what the other
issues afterwards, on another group) would wait for each other here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed import Work

from prismscale.emulation.backends.backend_order import blocks_host, is_in_host_memory
from prismscale.emulation.hook import Collective
from prismscale.live.exchange import Exchange
from prismscale.live.hook_base import StepEnd
from prismscale.live.host_hook import LiveHook, Pending

COMPUTING = 0
"""The default stream of a device, on which programs compute."""


class NullClock:
    """Logical time of the current stream of a null device, since it was made."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        self._origin_ns = self.host_ns()

    def host_ns(self) -> int:
        """Logical time of the host, since the device was made."""
        return int(self._library.ps_host_time_ns())

    def now_ns(self) -> int:
        """When what is issued now would begin."""
        stream_ns = int(self._library.ps_stream_time_ns(*self._current()))
        return max(self.host_ns(), stream_ns) - self._origin_ns

    def wait_until(self, end_ns: int) -> None:
        """What is issued from now on begins after ``end_ns``."""
        self._library.ps_advance_stream(*self._current(), end_ns + self._origin_ns)

    def block_host_until(self, end_ns: int) -> None:
        """The host does nothing before ``end_ns``."""
        self._library.ps_host_waits_until(end_ns + self._origin_ns)

    def forgive(self, lag_ns: int) -> None:
        """Emulation takes none of this time."""

    @contextmanager
    def without_cost(self) -> Iterator[None]:
        """What this thread does meanwhile takes none of the device's time."""
        self._library.ps_without_cost(1)
        try:
            yield
        finally:
            self._library.ps_without_cost(0)

    def before(self) -> None:
        """What the current stream is given begins after what the computing stream was."""
        device, _ = self._current()
        self._library.ps_advance_stream(
            *self._current(), self._library.ps_stream_time_ns(device, COMPUTING)
        )

    def after(self) -> None:
        """What the computing stream is given begins after what the current stream was."""
        device, _ = self._current()
        current_ns = self._library.ps_stream_time_ns(*self._current())
        self._library.ps_advance_stream(device, COMPUTING, current_ns)

    def _current(self) -> tuple[int, int]:
        device = self._library.ps_current_device()
        return device, self._library.ps_current_stream(device)


@dataclass(frozen=True, kw_only=True)
class HostExchange(Exchange):
    """Live ranks give each other what lies in the host's memory. What lies on a device that is not
    there has no bytes: it is answered as among virtual peers, and takes no memory on the way."""

    def peers(self, collective: Collective) -> list[int]:
        """Other live ranks that take part with bytes."""
        return super().peers(collective) if is_in_host_memory([collective]) else []


@dataclass(kw_only=True)
class NullLiveHook(LiveHook):
    """Answers a live rank's communications; what it does meanwhile costs the rank nothing."""

    clock: NullClock

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """As any live rank, aside from the device's time."""
        with self.clock.without_cost():
            return super().communicate(batch)

    def stretch(self) -> None:
        """Computation takes what the device's costs say; a slow rank's are higher."""

    def step_ended(self) -> None:
        """The program is at the end of a steady step; nobody follows this machine's speed."""
        self._steps.append(StepEnd(self.clock.now_ns(), self.waited_ns, self.lag_ns))

    def _complete(self, pending: Pending, began: int) -> None:
        # Again, because the wait of an asynchronous call comes from the program.
        with self.clock.without_cost():
            super()._complete(pending, began)
        if blocks_host(pending.batch):
            self.clock.block_host_until(self.clock.now_ns())
