"""The hook of a live rank on a device with streams: nothing here waits for the device.

A communication goes to a stream of its own. After the work that the program has issued so far, that
stream fills the outputs and is then held until the pacer opens the gate. ``Work.wait()`` only
orders one stream after another. The host stops only where a real one would (barriers, CPU tensors),
and where another live rank takes part, because live ranks exchange tensors in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import Work

from prismscale.devices.cuda import CudaStreams
from prismscale.devices.stream_device import CommunicationStreams, DeviceStreams, Stream
from prismscale.emulation.backends.backend_order import blocks_host, ordering
from prismscale.emulation.hook import Collective
from prismscale.emulation.work import EmulatedWork, in_flight
from prismscale.graph.node import CollectiveOp
from prismscale.host_comm.local_work import CommunicationLoad
from prismscale.live.coordinator.wire import Wire
from prismscale.live.exchange import Exchange
from prismscale.live.hook_base import LiveHookBase, StepEnd, combine_with_peers
from prismscale.live.live_spec import LiveSpec
from prismscale.live.pacer.client import PacerLink
from prismscale.live.pacer.cuda_words import CudaSignals
from prismscale.live.pacer.shared_words import Point, Points, Record, SharedWords, Signals, WordKind
from prismscale.live.trace_cursor import TraceCursor
from prismscale.payload.mirror import PayloadSource

Join = Callable[[], None]
IsDone = Callable[[], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class IssuedOnStream:
    """One batch that was issued."""

    batch: Sequence[Collective]
    instances: Sequence[str]
    channel: object
    """Key of the communication stream that the batch is on."""
    gate: Point


@dataclass(kw_only=True)
class StreamedHook(LiveHookBase):
    """Answers a live rank's communications; its pacer knows when they end."""

    streams: DeviceStreams
    signals: Signals
    link: PacerLink

    def __post_init__(self) -> None:
        self._communication = CommunicationStreams(self.streams)
        self._home = self.streams.current()
        self._counters, self._gates = Points(), Points()

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """Issue the batch; the host goes on."""
        self.count(batch)
        self.stretch()
        instances = [self.instances.name(c) for c in batch]
        is_shared = any(self.exchange.peers(c) for c in batch)
        # A shared batch goes to its stream only when it is joined, perhaps after batches that were
        # issued later. So shared batches get a stream of their own.
        channel = (batch[0].group.group_index, ordering(batch)[0], is_shared)
        gate = self._gates.next(channel)
        issued = IssuedOnStream(batch=batch, instances=instances, channel=channel, gate=gate)
        # The rank has arrived when the stream has done all work issued to it so far.
        arrival = self._count(self.streams.current())
        records = [self._arrival(c, arrival, gate) for c in batch]
        # Before the pacer hears of the arrival and tells the coordinator: see live/exchange.py.
        if is_shared:
            self._offer(issued)
        self.link.tell(*records, Record(WordKind.ISSUED, gate=gate))
        share = self.load.share(batch)
        share.begin()
        join, is_done = self._shared(issued) if is_shared else self._alone(issued)

        def wait(_: timedelta | None) -> None:
            share.wait()
            stream = self.streams.current()
            self.link.tell(Record(WordKind.JOIN, at=self._count(stream), gate=gate))
            join()
            # The counter's value after the JOIN's tells when the stream went on.
            self._count(stream)
            self.link.check()

        def wait_later(timeout: timedelta | None) -> None:
            # Stretch what the program has computed since it issued the batch.
            self.stretch()
            wait(timeout)

        if not batch[0].asynchronous:
            wait(None)
            return EmulatedWork(tuple(t for c in batch for t in c.outputs))
        # A shared batch is issued only when it is joined; another one's outputs are there already.
        return in_flight(batch, wait_later, is_done, poll_waits=is_shared)

    def stretch(self) -> None:
        """Make the computation since the last communication count :attr:`compute_factor` times.

        Only the program's first stream is stretched. Other streams are assumed to follow it.
        """
        stream = self.streams.current()
        if self.compute_factor == 1.0 or self.communications == 0 or stream != self._home:
            return
        gate = self._gates.next("stretch")
        self.link.tell(Record(WordKind.STRETCH, at=self._count(stream), gate=gate))
        self.signals.hold(stream, gate)

    def step_ended(self) -> None:
        """Note that the program is at the end of a steady step; the device gets there later."""
        self.stretch()
        self.link.tell(Record(WordKind.STEP, at=self._count(self.streams.current())))

    def finish(self) -> list[StepEnd]:
        """Wait for the device, then return the ends of all steady steps."""
        self.streams.synchronize()
        self.link.tell(Record(WordKind.END))
        return [StepEnd(*step) for step in self.link.hear()["steps"]]

    def close(self) -> None:
        """Open every gate: the rank is going away, and a held stream would keep it alive."""
        self.link.close()

    def _alone(self, issued: IssuedOnStream) -> tuple[Join, IsDone]:
        """Issue a batch with virtual peers only: everything is issued at once."""
        batch, gate = issued.batch, issued.gate

        def work(stream: Stream) -> None:
            for collective in batch:
                self.payload.fill(collective)
            self.signals.hold(stream, gate)

        flight = self._communication.issue(issued.channel, work)
        blocks = blocks_host(batch)
        return lambda: flight.join(blocks), lambda: self.streams.reached(flight.ended)

    def _offer(self, issued: IssuedOnStream) -> None:
        """Offer this rank's contributions to other live ranks, once its stream has made them."""
        self.streams.synchronize(self.streams.record(self.streams.current()))
        for collective, instance in zip(issued.batch, issued.instances, strict=True):
            peers = self.exchange.peers(collective)
            if peers and collective.op != CollectiveOp.RECV:
                self.exchange.offer(instance, collective, peers)

    def _shared(self, issued: IssuedOnStream) -> tuple[Join, IsDone]:
        """Issue a batch with other live ranks when it is joined.

        Their tensors are there once the coordinator has answered.
        """

        def work(stream: Stream) -> None:
            for collective, instance in zip(issued.batch, issued.instances, strict=True):
                if self.exchange.peers(collective):
                    self._combine(instance, collective)
                else:
                    self.payload.fill(collective)
            self.signals.hold(stream, issued.gate)

        def join() -> None:
            self.link.await_answer(issued.gate)
            self._communication.issue(issued.channel, work).join(blocks_host(issued.batch))

        return join, lambda: self.link.is_answered(issued.gate)

    def _combine(self, instance: str, collective: Collective) -> None:
        """Combine in host memory, so that the device's memory figures stay the program's own."""
        on_host = replace(
            collective,
            inputs=tuple(t.detach().cpu() for t in collective.inputs),
            outputs=tuple(t.detach().cpu() for t in collective.outputs),
        )
        combine_with_peers(self.exchange, self.payload, instance, on_host)
        with torch.no_grad():
            for output, value in zip(collective.outputs, on_host.outputs, strict=True):
                output.copy_(value)

    def _count(self, stream: Stream) -> Point:
        point = self._counters.next(stream)
        self.signals.count(stream, point)
        return point

    def _arrival(self, collective: Collective, arrival: Point, gate: Point) -> Record:
        position = self.cursor.next_position(collective)
        return Record(
            WordKind.UNCOVERED if position is None else WordKind.ARRIVE,
            at=arrival,
            gate=gate,
            position=position or 0,
            group_index=collective.group.group_index,
            op=int(collective.op),
            n_bytes=collective.n_bytes,
            hung=self.hung,
        )


def streamed_hook(
    spec: LiveSpec,
    wire: Wire,
    origin_ns: int,
    cursor: TraceCursor,
    payload: PayloadSource,
    exchange: Exchange,
    load: CommunicationLoad,
) -> StreamedHook:
    """Make the hook of a live rank on this machine's GPU, and start its pacer."""
    path = Path(spec.exchange) / f"words-{spec.rank}"
    words = SharedWords.create(path)
    return StreamedHook(
        cursor=cursor,
        streams=CudaStreams(),
        signals=CudaSignals(words),
        link=PacerLink.start(path, words, wire, origin_ns, spec.compute_factor),
        payload=payload,
        exchange=exchange,
        load=load,
        compute_factor=spec.compute_factor,
    )
