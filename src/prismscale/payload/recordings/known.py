"""A recorded communication as one live member sees it: flat results and contributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from prismscale.errors import UsageError
from prismscale.graph.node import CollectiveOp
from prismscale.payload.arithmetic import KIND
from prismscale.payload.combine import split_rows
from prismscale.payload.recordings.recorded_job import RecordedGift, RecordedJob
from prismscale.payload.recordings.recording_writer import RESULT
from prismscale.payload.recordings.remainders import exact
from prismscale.payload.recordings.selection import REDUCED_FOR_ALL

REDUCTIONS = REDUCED_FOR_ALL | {CollectiveOp.REDUCE}


@dataclass(kw_only=True)
class KnownCommunication:
    """The ``index``-th tensor of a recorded communication. It alone keeps the values it reads."""

    recording: RecordedJob
    name: str
    op: CollectiveOp
    ranks: Sequence[int]
    """Global ranks of the group, in group order."""
    receiver: int
    """Group rank of the live member."""
    root: int = -1
    kind: Any = KIND.SUM
    """Kind of the reduction."""
    index: int = 0
    count: int = 1
    """Number of tensors of the communication."""
    _read: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def result(self, start: int, stop: int) -> torch.Tensor:
        """Return a range of the live member's result."""
        if self.op in REDUCED_FOR_ALL:
            return self._flat(RESULT)[start:stop]
        if self.op is CollectiveOp.REDUCE:
            return self._reduced(start, stop)
        if self.op is CollectiveOp.ALL_GATHER:
            return self._gathered(start, stop)
        if self.op in (CollectiveOp.GATHER, CollectiveOp.ALL_TO_ALL):
            return self._concatenated()[start:stop]
        return self.said_by(self.root)[start:stop]

    def contribution(self, member: int, start: int, stop: int) -> torch.Tensor:
        """Return a range of a member's contribution to a reduction."""
        return self._flat(self.ranks[member])[start:stop]

    def is_enough(self, live: Sequence[int]) -> bool:
        """Return whether all that members outside ``live`` (group ranks) say was recorded."""
        if self.op in REDUCED_FOR_ALL:
            return self._has(RESULT) and all(self._has(self.ranks[m]) for m in live)
        if self.op in (CollectiveOp.BROADCAST, CollectiveOp.SCATTER, CollectiveOp.RECV):
            return self._has(self.ranks[self.root])
        if self.op is CollectiveOp.SEND:
            return True
        if self.op is CollectiveOp.REDUCE:
            return all(self._has(rank) for rank in self.ranks)
        # In an all-gather a live member's part passes absent members on its way to another.
        passes = self.op is CollectiveOp.ALL_GATHER and len(live) > 1
        here = set() if passes else set(live)
        return all(self._has(rank) for m, rank in enumerate(self.ranks) if m not in here)

    def _has(self, rank: int) -> bool:
        return self.recording.gift(self.name, rank) is not None

    def _reduced(self, start: int, stop: int) -> torch.Tensor:
        size = len(self.ranks)
        every = [self.contribution(m, start, stop) for m in range(size)]
        return exact(every, self.kind, size=size)

    def _gathered(self, start: int, stop: int) -> torch.Tensor:
        """Return a range of all members' inputs, concatenated; all have the same length."""
        each = self._length()
        first, last = start // each, -(-stop // each)
        whole = [self.said_by(m) for m in range(first, last)]
        flat = whole[0] if len(whole) == 1 else torch.cat(whole)
        return flat[start - first * each : stop - first * each]

    def _length(self) -> int:
        """Return the length of the input of any recorded member."""
        gifts = (self.recording.gift(self.name, rank) for rank in self.ranks)
        shape = next(gift for gift in gifts if gift).tensors[self.index].shape
        return torch.Size(shape).numel()

    def _concatenated(self) -> torch.Tensor:
        return torch.cat([self.said_by(m) for m in range(len(self.ranks))])

    def said_by(self, member: int) -> torch.Tensor:
        """Return a member's flat contribution to the live one's outputs, for all but reductions."""
        rank, size = self.ranks[member], len(self.ranks)
        if self.op is CollectiveOp.ALL_TO_ALL:
            rows = split_rows(self._tensors(rank), self._gift(rank).splits, size)
            return rows[self.receiver].reshape(-1)
        if self.op is CollectiveOp.SCATTER:
            return self._tensors(rank)[self.receiver].reshape(-1)
        return self._tensors(rank)[self.index].reshape(-1)

    def _flat(self, rank: int) -> torch.Tensor:
        """Return a flat tensor of a reduction; of a list reduce_scatter, its list concatenated."""
        tensors, size = self._tensors(rank), len(self.ranks)
        if self.op is CollectiveOp.REDUCE_SCATTER and len(tensors) == self.count * size > 1:
            own = tensors[self.index * size : (self.index + 1) * size]
            return torch.cat([t.reshape(-1) for t in own])
        return tensors[self.index].reshape(-1)

    def _tensors(self, rank: int) -> list[torch.Tensor]:
        if rank not in self._read:
            self._read[rank] = self.recording.tensors(self.name, self._gift(rank))
        return self._read[rank]

    def _gift(self, rank: int) -> RecordedGift:
        gift = self.recording.gift(self.name, rank)
        if gift is None:
            who = "its result" if rank == RESULT else f"what rank {rank} gave to it"
            raise UsageError(
                f"{self.op.spelling} {self.name} was recorded without {who}, and nothing else "
                "tells what absent members say: record it of all ranks (--record without rank=)"
            )
        return gift
