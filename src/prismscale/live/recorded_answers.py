"""Recorded contributions of absent members, put together with those of live members now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from prismscale.emulation.hook import Collective
from prismscale.graph.node import CollectiveOp
from prismscale.payload.arithmetic import KIND, accumulate, divide, kind_of, signed
from prismscale.payload.combine import write_parts
from prismscale.payload.recordings.known import REDUCTIONS, KnownCommunication
from prismscale.payload.recordings.recorded_job import RecordedJob
from prismscale.payload.recordings.remainders import exact, partial_kind, remainder


@dataclass(kw_only=True)
class RecordedAnswers:
    """Answers a live rank's communications from a recording."""

    recording: RecordedJob
    live: frozenset[int]
    answered: int = 0

    def knows(self, name: str, collective: Collective) -> bool:
        """Whether all contributions of absent members were recorded. Live members agree on it."""
        if name not in self.recording or kind_of(collective.reduce_op) == KIND.PREMUL_SUM:
            return False
        ranks = collective.group.ranks
        live = [m for m, rank in enumerate(ranks) if rank in self.live]
        return self._known(name, collective, 0).is_enough(live)

    def fill(
        self, name: str, collective: Collective, parts: Mapping[int, Sequence[torch.Tensor]]
    ) -> None:
        """Fill the outputs. ``parts``: each live member's contribution to them, by group rank."""
        self.answered += 1
        with torch._C._AutoDispatchBelowADInplaceOrView():
            if collective.op in REDUCTIONS:
                for i in range(len(collective.outputs)):
                    self._reduce(name, collective, i, {m: parts[m][i] for m in parts})
            else:
                write_parts(collective, self._with_absent(name, collective, parts))

    def _reduce(
        self, name: str, collective: Collective, i: int, parts: Mapping[int, torch.Tensor]
    ) -> None:
        group, output = collective.group, collective.outputs[i]
        if collective.op is CollectiveOp.REDUCE and collective.root != group.group_rank:
            return
        known, kind = self._known(name, collective, i), kind_of(collective.reduce_op)
        start = _start(collective, i)
        stop = start + output.numel()
        then = [known.contribution(m, start, stop) for m in parts]
        total = remainder(known.result(start, stop), then, kind, group.size)
        if total is None:
            others = [m for m in range(group.size) if m not in parts]
            total = exact([known.contribution(m, start, stop) for m in others], kind)
        for part in parts.values():
            accumulate(signed(total), signed(part.reshape(-1).clone()), partial_kind(kind), 1)
        if kind == KIND.AVG:
            divide(total, group.size)
        output.copy_(total.view(output.shape))

    def _with_absent(
        self, name: str, collective: Collective, parts: Mapping[int, Sequence[torch.Tensor]]
    ) -> dict[int, Sequence[torch.Tensor]]:
        op, group = collective.op, collective.group
        found = dict(parts)
        is_from_one = op in (CollectiveOp.BROADCAST, CollectiveOp.SCATTER, CollectiveOp.RECV)
        members = [collective.root] if is_from_one else range(group.size)
        count = len(collective.outputs) if is_from_one else len(collective.inputs)
        if op in (CollectiveOp.ALL_TO_ALL, CollectiveOp.SCATTER):
            count = 1
        for member in members:
            if member not in found:
                found[member] = [
                    self._known(name, collective, i).said_by(member) for i in range(count)
                ]
        return found

    def _known(self, name: str, collective: Collective, i: int) -> KnownCommunication:
        return KnownCommunication(
            recording=self.recording,
            name=name,
            op=collective.op,
            ranks=collective.group.ranks,
            receiver=collective.group.group_rank,
            root=collective.root,
            kind=kind_of(collective.reduce_op),
            index=i,
            count=len(collective.outputs),
        )


def _start(collective: Collective, i: int) -> int:
    """Element at which this rank's part of the i-th result begins."""
    if collective.op is not CollectiveOp.REDUCE_SCATTER:
        return 0
    size, mine = collective.group.size, collective.group.group_rank
    if len(collective.inputs) == len(collective.outputs):
        return mine * collective.outputs[i].numel()
    return sum(t.numel() for t in collective.inputs[i * size : i * size + mine])
