"""Executes the rounds of one live member on a flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from prismscale.graph.node import CollectiveOp
from prismscale.payload.arithmetic import KIND, accumulate, scale, signed
from prismscale.payload.recordings.remainders import partial_kind
from prismscale.transfers.schedule import Algorithm, BufferPart, Packet, Shape, chunk, rounds


class UnderWay(Protocol):
    """A message in progress."""

    def wait(self) -> Any:
        """Wait until the message has been sent or received."""
        ...


class Links(Protocol):
    """Messages between members of one communication. Those of one pair arrive in order."""

    def send(self, peer: int, data: torch.Tensor) -> UnderWay:
        """Start sending a flat tensor. It must not change until the send has been waited for."""
        ...

    def receive(self, peer: int, data: torch.Tensor) -> UnderWay:
        """Start receiving into a flat tensor."""
        ...


@dataclass(kw_only=True)
class Member:
    """One member of one communication.

    It sends from ``given``, and ``held`` has its result in the end. Both are the same flat tensor
    where the communication works in place. Partial sums that it receives are added to ``held``.
    """

    shape: Shape
    group_rank: int
    is_pruned: bool
    """Whether some member of the group is absent."""
    given: torch.Tensor
    held: torch.Tensor
    kind: Any = KIND.SUM
    """The reduction operator."""
    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0

    def run(self, links: Links) -> None:
        """Execute all rounds."""
        had_partial = False
        for step in rounds(self.shape, self.group_rank, is_pruned=self.is_pruned):
            is_partial = any(p.is_partial for m in (step.send, step.receive) if m for p in m.parts)
            if had_partial and not is_partial:
                self._finish_sum()
            had_partial = is_partial
            if step.in_turn or step.send is None or step.receive is None:
                self._receive(links, step.receive)
                self._send(links, step.send)
                continue
            # Send and receive overlap. The send starts first, so that no member waits for it.
            data = self._packed(step.send)
            under_way = links.send(step.send.peer, data)
            self._receive(links, step.receive)
            under_way.wait()
            self._count_sent(data)
        if had_partial:
            self._finish_sum()

    def _finish_sum(self) -> None:
        """Divide the sums that this member owns, if the reduction is an average."""
        if self.kind != KIND.AVG:
            return
        is_tree = self.shape.algorithm is Algorithm.TREE
        if is_tree and self.shape.op is not CollectiveOp.REDUCE:
            own = (0, self.shape.numel if self.group_rank == 0 else 0)
        else:
            own = chunk(self.shape, self.group_rank)
        part, size = self.held[slice(*own)], self.shape.size
        if part.dtype.is_floating_point and part.element_size() > 1:
            part.div_(size)
        elif part.numel():
            scale(part, 1 / size)

    def _send(self, links: Links, message: Packet | None) -> None:
        if message is not None:
            data = self._packed(message)
            links.send(message.peer, data).wait()
            self._count_sent(data)

    def _count_sent(self, data: torch.Tensor) -> None:
        self.sent_bytes += data.nbytes
        self.messages += 1

    def _receive(self, links: Links, message: Packet | None) -> None:
        if message is None:
            return
        room = self.held.new_empty(message.numel)
        links.receive(message.peer, room).wait()
        self.received_bytes += room.nbytes
        self.messages += 1
        for part, values in zip(message.parts, _parts_of(room, message.parts), strict=True):
            target = self.held[part.start : part.stop]
            if part.is_partial:
                accumulate(signed(target), signed(values), partial_kind(self.kind), 1)
            else:
                target.copy_(values)

    def _packed(self, message: Packet) -> torch.Tensor:
        parts = message.parts
        if len(parts) == 1:
            return self.given[parts[0].start : parts[0].stop].clone()
        return torch.cat([self.given[p.start : p.stop] for p in parts])


def _parts_of(data: torch.Tensor, parts: Sequence[BufferPart]) -> Sequence[torch.Tensor]:
    return torch.split(data, [p.stop - p.start for p in parts])
