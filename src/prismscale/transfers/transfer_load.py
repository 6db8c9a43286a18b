"""Performs a live rank's real transfers in the background, with one thread for each channel."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns  # by name: a program's ``time`` may be logical
from typing import Any

import torch

from prismscale.analysis.moved import Moved
from prismscale.emulation.hook import Collective
from prismscale.errors import StuckError
from prismscale.payload.arithmetic import kind_of
from prismscale.transfers.flat import FlatCommunication, flat_communications, is_transferred
from prismscale.transfers.gloo_links import GlooLinks
from prismscale.transfers.member import Member
from prismscale.transfers.schedule import Algorithm
from prismscale.transfers.told import AssistantWire, Told, reduction_name

ENDING_S = 2.0
"""Longest wait for messages in progress after the program has ended."""
IsKnown = Callable[[str, Collective], bool]
"""Whether the values of absent members in a communication were recorded."""


@dataclass(kw_only=True)
class TransferWork:
    """The messages of one batch (a LocalWork)."""

    load: TransferLoad
    batch: Sequence[Collective]
    names: Sequence[str]
    _left: int = 0
    _failure: BaseException | None = None
    _done: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Hand each communication to its channel's thread."""
        moving = [(c, n) for c, n in zip(self.batch, self.names, strict=True) if is_transferred(c)]
        self._left = len(moving)
        if not moving:
            self._done.set()
        for collective, name in moving:
            self.load.enqueue(QueuedTransfer(work=self, collective=collective, name=name))

    def wait(self) -> None:
        """Wait until all messages have been sent and received.

        Raises:
            StuckError: the other end is gone.
        """
        self._done.wait()
        if self._failure is not None:
            raise StuckError(
                f"real transfers ended ({self._failure}): another live rank, or the assistants, "
                "are gone; their logs say why"
            ) from self._failure

    def waited(self, since_issue: bool) -> None:
        """Do nothing: no time is measured here."""

    def is_over(self) -> bool:
        """Whether :meth:`wait` returns at once."""
        return self._done.is_set()

    def ended(self, failure: BaseException | None) -> None:
        """Note that one communication of the batch has ended."""
        with self._lock:
            self._left -= 1
            self._failure = self._failure or failure
            if self._left <= 0 or failure is not None:
                self._done.set()


@dataclass(frozen=True, kw_only=True)
class QueuedTransfer:
    """One communication in the queue of its channel's thread."""

    work: TransferWork
    collective: Collective
    name: str


@dataclass(kw_only=True)
class TransferLoad:
    """The real transfers of one live rank."""

    rank: int
    live: tuple[int, ...]
    """Live global ranks, in the order of the context's members. The assistants come last there."""
    context: Any
    wire: AssistantWire
    is_known: IsKnown
    algorithm: Algorithm = Algorithm.RING
    _queues: dict[str, queue.Queue[QueuedTransfer]] = field(default_factory=dict)
    _sums: Moved = field(default_factory=Moved)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _under_way: int = 0
    recorded: int = 0
    """Communications with absent members whose values were recorded."""

    def share(self, batch: Sequence[Collective], names: Sequence[str]) -> TransferWork:
        """Return a batch's messages, not yet begun. ``names`` are the same on all members."""
        return TransferWork(load=self, batch=batch, names=names)

    def defines(self, name: str, collective: Collective) -> bool:
        """Whether the messages give the outputs their real values.

        They do if no member is absent, or if the values of absent members were recorded.
        """
        if not is_transferred(collective):
            return False
        return not self._is_pruned(collective) or self.is_known(name, collective)

    def moved(self) -> Moved:
        """Return what this rank has sent and received so far."""
        return self._sums

    def close(self) -> None:
        """Wait at most :data:`ENDING_S` for messages in progress to end."""
        deadline = time.monotonic() + ENDING_S
        while self._under_way and time.monotonic() < deadline:
            time.sleep(0.005)

    def enqueue(self, job: QueuedTransfer) -> None:
        """Queue a communication for its channel's thread."""
        channel = job.name.rpartition(".")[0]
        with self._lock:
            self._under_way += 1
            if channel not in self._queues:
                in_order: queue.Queue[QueuedTransfer] = queue.Queue()
                self._queues[channel] = in_order
                arguments = (channel, in_order)
                threading.Thread(target=self._work, args=arguments, daemon=True).start()
            self._queues[channel].put(job)

    def _is_pruned(self, collective: Collective) -> bool:
        """Whether a rank that takes part is absent."""
        ranks = collective.group.ranks
        if collective.op.is_p2p:
            return ranks[collective.root] not in self.live
        return len(ranks) > len(self.live) or any(r not in self.live for r in ranks)

    def _work(self, channel: str, in_order: queue.Queue[QueuedTransfer]) -> None:
        number: int | None = None
        while True:
            job = in_order.get()
            failure: BaseException | None = None
            try:
                number = self.wire.channel(channel) if number is None else number
                # Run below autograd, as a backend does.
                with torch._C._AutoDispatchBelowADInplaceOrView():
                    self._move(job, number)
            except BaseException as error:
                failure = error
            job.work.ended(failure)
            with self._lock:
                self._under_way -= 1

    def _move(self, job: QueuedTransfer, channel: int) -> None:
        collective = job.collective
        is_pruned = self._is_pruned(collective)
        defines = self.defines(job.name, collective)
        live = self._live_members(collective)
        links = GlooLinks(self.context, lambda peer: self._place(collective, peer), channel)
        parts = flat_communications(collective, self.algorithm)
        for part in parts:
            if is_pruned:
                told = self._told(job, part, channel, live, count=len(parts), known=defines)
                self.wire.tell(told)
            began_ns = perf_counter_ns()
            given, held = part.buffers()
            member = Member(
                shape=part.shape,
                group_rank=collective.group.group_rank,
                is_pruned=is_pruned,
                given=given,
                held=held,
                kind=kind_of(collective.reduce_op),
            )
            member.run(links)
            if defines:
                part.write(held)
            self._count(member, defines, perf_counter_ns() - began_ns)
        if is_pruned and defines:
            with self._lock:
                self.recorded += 1

    def _count(self, member: Member, defines: bool, busy_ns: int) -> None:
        one = Moved(
            communications=1,
            defined=int(defines),
            messages=member.messages,
            sent_bytes=member.sent_bytes,
            received_bytes=member.received_bytes,
            busy_ns=busy_ns,
        )
        with self._lock:
            self._sums = self._sums.plus(one)

    def _live_members(self, collective: Collective) -> tuple[int, ...]:
        """Return the group ranks of live members."""
        ranks = collective.group.ranks
        if len(ranks) == ranks[-1] - ranks[0] + 1 == len(set(ranks)):
            # Ranks are consecutive, so a world of thousands need not be searched.
            return tuple(r - ranks[0] for r in self.live if ranks[0] <= r <= ranks[-1])
        places = {rank: i for i, rank in enumerate(ranks)}
        return tuple(sorted(places[r] for r in self.live if r in places))

    def _place(self, collective: Collective, peer: int) -> int:
        """Return the context member that is, or stands in for, a group rank."""
        rank = collective.group.ranks[peer]
        return self.live.index(rank) if rank in self.live else len(self.live)

    def _told(
        self,
        job: QueuedTransfer,
        part: FlatCommunication,
        channel: int,
        live: tuple[int, ...],
        *,
        count: int,
        known: bool,
    ) -> Told:
        shape, group = part.shape, job.collective.group
        return Told(
            name=job.name,
            channel=channel,
            op=int(shape.op),
            size=shape.size,
            numel=shape.numel,
            root=shape.root,
            algorithm=shape.algorithm.value,
            dtype=str(part.dtype).removeprefix("torch."),
            reduction=reduction_name(kind_of(job.collective.reduce_op)),
            receiver=group.group_rank,
            live=live,
            index=part.index,
            count=count,
            ranks=group.ranks if known else (),
            send_splits=shape.send_splits,
            receive_splits=shape.receive_splits,
        )
