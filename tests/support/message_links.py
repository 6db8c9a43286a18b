"""Links between threads of a test, in place of gloo."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from prismscale.transfers.absent_neighbours import AbsentNeighbours
from prismscale.transfers.member import Member

PATIENCE_S = 20.0


class _Sent:
    def wait(self) -> None:
        """A queue takes it at once."""


class _Awaited:
    def __init__(self, channel: queue.Queue[torch.Tensor], room: torch.Tensor) -> None:
        self._channel, self._room = channel, room

    def wait(self) -> None:
        """Take the oldest message, which must be as long as it was expected to be."""
        came = self._channel.get(timeout=PATIENCE_S)
        if came.numel() != self._room.numel():
            raise AssertionError(f"{came.numel()} elements came, of {self._room.numel()}")
        self._room.copy_(came)


class Hub:
    """Channels of one communication, by sender and receiver."""

    def __init__(self) -> None:
        self.channels: defaultdict[tuple[int, int], queue.Queue[torch.Tensor]] = defaultdict(
            queue.Queue
        )
        self.lock = threading.Lock()

    def channel(self, sender: int, receiver: int) -> queue.Queue[torch.Tensor]:
        """The one from ``sender`` to ``receiver``."""
        with self.lock:
            return self.channels[sender, receiver]

    def of(self, member: int) -> HubLinks:
        """The links of one member."""
        return HubLinks(self, member)


class HubLinks:
    """One member's links."""

    def __init__(self, hub: Hub, member: int) -> None:
        self._hub, self._member = hub, member

    def send(self, peer: int, data: torch.Tensor) -> _Sent:
        """Put into the queue."""
        self._hub.channel(self._member, peer).put(data.clone())
        return _Sent()

    def receive(self, peer: int, data: torch.Tensor) -> _Awaited:
        """Wait later."""
        return _Awaited(self._hub.channel(peer, self._member), data)


def make(
    members: Mapping[int, Member], stand_ins: Mapping[int, AbsentNeighbours] | None = None
) -> None:
    """Run members, and stand-ins of those who are absent, side by side to their end."""
    hub = Hub()
    calls: list[Callable[[], None]] = [
        lambda rank=rank, member=member: member.run(hub.of(rank))
        for rank, member in members.items()
    ]
    calls += [lambda s=s: _stand_in(hub, s) for s in (stand_ins or {}).values()]
    failures: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure
    left = [key for key, channel in hub.channels.items() if not channel.empty()]
    if left:
        raise AssertionError(f"messages that nobody took: {left}")


def _stand_in(hub: Hub, stand_in: AbsentNeighbours) -> None:
    for step in stand_in.rounds():
        if step.receive:
            links = hub.of(step.receive.peer)
            links.send(stand_in.receiver, stand_in.message(step.receive)).wait()
        if step.send:
            room = torch.empty(step.send.numel, dtype=stand_in.dtype)
            hub.of(step.send.peer).receive(stand_in.receiver, room).wait()
