"""The messages that absent neighbours exchange with one live member, and the values in them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from prismscale.payload.arithmetic import KIND
from prismscale.payload.recordings.remainders import exact, neutral, remainder
from prismscale.transfers.neighbour_rules import Said, Say, said
from prismscale.transfers.schedule import BufferPart, Packet, Round, Shape, rounds


class KnownValues(Protocol):
    """Recorded values of one communication, as flat tensors."""

    def result(self, start: int, stop: int) -> torch.Tensor:
        """Return a range of the live member's result."""
        ...

    def contribution(self, member: int, start: int, stop: int) -> torch.Tensor:
        """Return a range of a member's input to a reduction."""
        ...


@dataclass(frozen=True, kw_only=True)
class AbsentNeighbours:
    """The absent neighbours of one live member in one communication."""

    shape: Shape
    receiver: int
    """Group rank of the live member."""
    live: Collection[int]
    """Group ranks of all live members."""
    dtype: torch.dtype
    kind: Any = KIND.SUM
    values: KnownValues | None = None
    """None: messages have the right length and hold zeros."""

    def rounds(self) -> Iterator[Round]:
        """Yield the live member's rounds, with only its messages to and from absent members."""
        is_pruned = len(self.live) < self.shape.size
        for step in rounds(self.shape, self.receiver, is_pruned=is_pruned):
            send, receive = (self._of_absent(m) for m in (step.send, step.receive))
            if send or receive:
                yield Round(send=send, receive=receive, in_turn=step.in_turn)

    def _of_absent(self, message: Packet | None) -> Packet | None:
        return None if message is None or message.peer in self.live else message

    def message(self, received: Packet) -> torch.Tensor:
        """Return the values of the message ``received``, as a flat tensor."""
        if self.values is None:
            return torch.zeros(received.numel, dtype=self.dtype)
        values = self.values
        parts = [self._part(received.peer, part, values) for part in received.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, absent: int, part: BufferPart, values: KnownValues) -> torch.Tensor:
        told = said(self.shape, absent, self.receiver, part, self.live)
        if told.say is Say.RESULT:
            return values.result(part.start, part.stop)
        if told.say is Say.NOTHING:
            return neutral(torch.empty(part.stop - part.start, dtype=self.dtype), self.kind)
        return self._remainder(told, values)

    def _remainder(self, told: Said, values: KnownValues) -> torch.Tensor:
        start, stop = told.part.start, told.part.stop
        added = [values.contribution(m, start, stop) for m in told.added_by]
        left = remainder(values.result(start, stop), added, self.kind, self.shape.size)
        if left is not None:
            return left
        others = [m for m in range(self.shape.size) if m not in told.added_by]
        return exact([values.contribution(m, start, stop) for m in others], self.kind)
