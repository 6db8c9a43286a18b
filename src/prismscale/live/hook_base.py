"""What hooks of live ranks have in common, on a CPU, a null device or a GPU."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil
import torch
from torch.distributed import Work

from prismscale.emulation.hook import Collective
from prismscale.emulation.instance_ids import InstanceIds
from prismscale.graph.node import CollectiveOp
from prismscale.host_comm.local_work import CommunicationLoad
from prismscale.live.exchange import Exchange
from prismscale.live.recorded_answers import RecordedAnswers
from prismscale.live.trace_cursor import TraceCursor
from prismscale.payload.combine import own_part, part_of
from prismscale.payload.mirror import PayloadSource


class StepEnd(NamedTuple):
    """The end of a steady step, in logical time, with totals since the job began."""

    end_ns: int
    waited_ns: int
    """Spent waiting for communications."""
    lag_ns: int
    """What the emulation cost, which is not in ``end_ns``."""


@dataclass(kw_only=True)
class LiveHookBase(ABC):
    """Answers a live rank's communications (a CommunicationHook and GroupObserver)."""

    cursor: TraceCursor
    payload: PayloadSource
    exchange: Exchange
    load: CommunicationLoad
    compute_factor: float = 1.0
    """Logical time of a computation over the time it takes here."""
    hung: bool = False
    """From now on this rank arrives nowhere."""
    communications: int = 0
    boot_s: float = 0.0
    """From the start of the process to the first communication."""
    instances: InstanceIds = field(default_factory=InstanceIds)

    @abstractmethod
    def communicate(self, batch: Sequence[Collective]) -> Work:
        """Tell the coordinator of the batch; the handle completes at the calibrated end."""

    @abstractmethod
    def stretch(self) -> None:
        """Let the computation since the last communication take :attr:`compute_factor` times as
        long."""

    @abstractmethod
    def step_ended(self) -> None:
        """The program is at the end of a steady step."""

    @abstractmethod
    def finish(self) -> list[StepEnd]:
        """What was seen of each steady step, once all of it has been."""

    @abstractmethod
    def close(self) -> None:
        """Nothing outlives the program."""

    def group_created(
        self, ranks: tuple[int, ...], name: str, backend: str, group_index: int | None
    ) -> None:
        """Groups are named for the exchange with other live ranks."""
        self.instances.group_created(ranks, name, backend, group_index)

    def count(self, batch: Sequence[Collective]) -> None:
        """Note that the program calls ``batch``; the first call ends its boot."""
        if self.communications == 0:
            self.boot_s = time.time() - psutil.Process().create_time()
        self.communications += len(batch)


def combine_with_peers(
    exchange: Exchange,
    payload: PayloadSource,
    instance: str,
    collective: Collective,
    recorded: RecordedAnswers | None = None,
) -> None:
    """Outputs of a communication that other live ranks take part in, or that was ``recorded``."""
    group = collective.group
    if collective.op == CollectiveOp.SEND:
        return
    parts = {
        group.ranks.index(peer): part_of(collective, exchange.take(instance, peer, collective))
        for peer in exchange.peers(collective)
    }
    if not collective.op.is_p2p:
        parts[group.group_rank] = own_part(collective)
    device = collective.outputs[0].device if collective.outputs else torch.device("cpu")
    if device.type != "cpu":
        parts = {m: [t.to(device) for t in ts] for m, ts in parts.items()}
    rooted = collective.op in (CollectiveOp.BROADCAST, CollectiveOp.SCATTER)
    if recorded is not None:
        recorded.fill(instance, collective, parts)
        return
    with torch.no_grad():
        # The root is virtual: no live rank has what it sends.
        if rooted and collective.root not in parts:
            payload.fill(collective)
        else:
            payload.fill_among(collective, parts)
