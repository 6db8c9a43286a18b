"""Base class of the hooks of live ranks on a CPU, a null device or a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time  # by name: a program's ``time`` may be logical
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
    """Total time spent waiting for communications."""
    lag_ns: int
    """Total time that the emulation cost. ``end_ns`` does not contain it."""


@dataclass(kw_only=True)
class LiveHookBase(ABC):
    """Answers a live rank's communications (a CommunicationHook and GroupObserver)."""

    cursor: TraceCursor
    payload: PayloadSource
    exchange: Exchange
    load: CommunicationLoad
    compute_factor: float = 1.0
    """Logical time of a computation, divided by the time that it takes on this machine."""
    hung: bool = False
    """True once this rank hangs: it arrives at no communication from then on."""
    communications: int = 0
    boot_s: float = 0.0
    """Time from the start of the process to the first communication."""
    instances: InstanceIds = field(default_factory=InstanceIds)

    @abstractmethod
    def communicate(self, batch: Sequence[Collective]) -> Work:
        """Tell the coordinator about the batch. The handle completes at the calibrated end."""

    @abstractmethod
    def stretch(self) -> None:
        """Make the computation since the last communication count :attr:`compute_factor` times."""

    @abstractmethod
    def step_ended(self) -> None:
        """Note that the program is at the end of a steady step."""

    @abstractmethod
    def finish(self) -> list[StepEnd]:
        """Return the ends of all steady steps, once each of them is known."""

    @abstractmethod
    def close(self) -> None:
        """Release everything that the hook holds: nothing outlives the program."""

    def group_created(
        self, ranks: tuple[int, ...], name: str, backend: str, group_index: int | None
    ) -> None:
        """Name the group for the exchange with other live ranks."""
        self.instances.group_created(ranks, name, backend, group_index)

    def count(self, batch: Sequence[Collective]) -> None:
        """Count the communications of ``batch``. The first call ends the program's boot."""
        if self.communications == 0:
            self.boot_s = time() - psutil.Process().create_time()
        self.communications += len(batch)


def combine_with_peers(
    exchange: Exchange,
    payload: PayloadSource,
    instance: str,
    collective: Collective,
    recorded: RecordedAnswers | None = None,
) -> None:
    """Fill the outputs of a communication that has other live members, or that was ``recorded``."""
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
        # A virtual root: no live rank has the tensors that it sends.
        if rooted and collective.root not in parts:
            payload.fill(collective)
        else:
            payload.fill_among(collective, parts)
