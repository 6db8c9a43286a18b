"""Every message that absent neighbours exchange with one live member, and the values in it."""

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
    """What a communication was when it was recorded; flat tensors."""

    def result(self, start: int, stop: int) -> torch.Tensor:
        """A range of what the live member ends with."""
        ...

    def contribution(self, member: int, start: int, stop: int) -> torch.Tensor:
        """A range of what a member of the group put into a reduction."""
        ...


@dataclass(frozen=True, kw_only=True)
class AbsentNeighbours:
    """Absent neighbours of one live member, in one communication."""

    shape: Shape
    receiver: int
    """Group rank of the live member."""
    live: Collection[int]
    """Group ranks of all live members."""
    dtype: torch.dtype
    kind: Any = KIND.SUM
    values: KnownValues | None = None
    """None: messages have the right length, and nothing that counts in them."""

    def rounds(self) -> Iterator[Round]:
        """The live member's rounds, without those among live members: what it sends to absent ones,
        and receives from them."""
        is_pruned = len(self.live) < self.shape.size
        for step in rounds(self.shape, self.receiver, is_pruned=is_pruned):
            send, receive = (self._of_absent(m) for m in (step.send, step.receive))
            if send or receive:
                yield Round(send=send, receive=receive, in_turn=step.in_turn)

    def _of_absent(self, message: Packet | None) -> Packet | None:
        return None if message is None or message.peer in self.live else message

    def message(self, received: Packet) -> torch.Tensor:
        """What ``received`` holds, flat."""
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
