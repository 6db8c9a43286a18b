"""The recording hook: turns a running program into a stream of spans and communications.

[Note: spans] The recorder cuts the time of the program's own lane into spans, wherever an edge to
another lane begins or ends: at the issue of a communication, at the wait for one, and at the start
of a backward pass and of an optimizer. The span between two cuts is one COMPUTE node. A synchronous
collective makes one cut, at its issue: nothing runs between issue and wait, and the node after it
waits for it. The recorder's own work (normalising, payload, bookkeeping) lies between the end of
one span and the start of the next, and is in neither. On a device with streams each stream is such
a lane, and the program's own events between streams are cuts too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter_ns  # by name: a program's ``time`` may be logical

from torch.distributed import Work

from prismscale.capture.node_stream import NodeStream, StreamNode
from prismscale.devices.protocol import CaptureDevice, CommunicationEnd, ProgramLane
from prismscale.emulation.backends.backend_memory import take_workspace
from prismscale.emulation.backends.backend_order import (
    blocks_host,
    is_in_host_memory,
    ordering,
    takes_host,
)
from prismscale.emulation.call_site import call_site
from prismscale.emulation.hook import Collective
from prismscale.emulation.instance_ids import peer_of
from prismscale.emulation.step_detection import BACKWARD, FORWARD, OPTIMIZER
from prismscale.emulation.work import EmulatedWork, in_flight
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import GroupRecord
from prismscale.host_comm.compute_clock import ProgramTime, moment
from prismscale.host_comm.local_work import CommunicationLoad, NullLoad
from prismscale.payload.mirror import PayloadSource


@dataclass(slots=True)
class Issued:
    """A batch of communications in flight on the captured rank."""

    stream: NodeStream
    positions: list[int]
    blocks_host: bool
    ended: CommunicationEnd
    workspace: object
    """Memory that the backend holds until the communication ends."""

    def took(self, ns: int, index: int | None = None, late_ns: int = 0, /) -> None:
        """Note the duration of each communication of the batch, or of its ``index``-th one."""
        # The last call counts: see [Note: when a node is final].
        positions = self.positions if index is None else [self.positions[index]]
        self.stream.took(positions, ns, late_ns)

    def join(self, lane: ProgramLane) -> None:
        """Note that the program has waited for the end."""
        # The backend has freed its workspace by the time the program continues.
        self.workspace = None
        self.ended()
        lane.joins(self.positions, self.blocks_host)


class Recorder:
    """Records every communication and completes it at once.

    It is a CommunicationHook, a GroupObserver and a StepListener.
    """

    def __init__(
        self,
        device: CaptureDevice,
        payload: PayloadSource,
        *,
        load: CommunicationLoad | None = None,
    ) -> None:
        self.stream = NodeStream()
        self.groups: list[GroupRecord] = []
        self.known_groups: list[GroupRecord] = []
        self._device = device
        self._payload = payload
        self._load = load or NullLoad()
        self._spans = device.spans(self.stream, FORWARD)
        self._time = ProgramTime()
        self._asked_ns = 0
        """Time that polling of communications has taken in the open span."""
        self._in_flight: dict[tuple[int, str], list[list[int]]] = {}
        """By lane: the latest batches, oldest first, as many as the backend runs at a time."""

    def group_created(
        self, ranks: tuple[int, ...], name: str, backend: str, group_index: int | None
    ) -> None:
        """Note a group; its group index is its position in :attr:`groups`."""
        record = GroupRecord(ranks=ranks, name=name, backend=backend)
        self.known_groups.append(record)
        if group_index is not None:
            self.groups.append(record)

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """Record the batch, fill its outputs, and complete."""
        if takes_host(batch):
            self._spans.communicates()
        with self._stopped(ended_ns=batch[0].called_ns) as lane:
            issued = self._issue(batch, lane)
            share = self._load.share(batch, issued.took)
            if not batch[0].asynchronous:
                share.begin()
                share.wait()
                share.waited(since_issue=True)
                issued.join(lane)
                return EmulatedWork(batch[0].outputs)
            waiting_ns = self._time.waiting_since(self._load)

            def joined(_: timedelta | None) -> None:
                # Wait first: gloo's threads share the core with any bookkeeping before the wait.
                at = moment()
                share.wait()
                with self._stopped(at, ended_ns=at[0]) as waiting:
                    before_ns = waiting_ns()
                    # The waiting time belongs to the span that the pause has just closed, which is
                    # the stream's last node: see [Note: when a node is final].
                    self.stream.leave_out(before_ns)
                    share.waited(before_ns > 0)
                    issued.join(waiting)

            def is_over() -> bool:
                began_ns = perf_counter_ns()
                over = share.is_over()
                self._asked_ns += perf_counter_ns() - began_ns
                return over

            answered = any(self._load.answers(c) for c in batch)
            work = in_flight(batch, joined, is_over if answered else None)
        # The start counts as the program's own time, because a real enqueue takes as long. The
        # recorder does nothing after it: gloo's threads would have to wait for the core.
        share.begin()
        return work

    @contextmanager
    def _stopped(
        self, at: tuple[int, int] | None = None, ended_ns: int = 0
    ) -> Iterator[ProgramLane]:
        """Stop the program's clock and its span while the block runs.

        Args:
            at: the :func:`moment` at which the program stopped; None: now.
            ended_ns: reading of the monotonic clock at which its span ended; the time since then
                was the recorder's. 0: not known. Ignored where marks are not such readings.
        """
        ended = ended_ns if ended_ns and self._load.interrupts else None
        # See [Note: spans]: the time until the block ends lies in no span.
        with self._paused(ended) as lane:
            self._time.stop(at)
            yield lane
            # The next span begins last, because everything before is not the program's work.
            self._time.go()

    @contextmanager
    def _paused(self, ended: int | None = None) -> Iterator[ProgramLane]:
        with self._spans.paused(ended=ended) as lane:
            if self._asked_ns:
                self.stream.leave_out(self._asked_ns)
                self._asked_ns = 0
            yield lane

    def _issue(self, batch: Sequence[Collective], lane: ProgramLane) -> Issued:
        where = batch[0].site or call_site()
        site = self.stream.sites.id(where) if where else -1
        channel, width = ordering(batch)
        key = (batch[0].group.group_index, channel)
        held = self._in_flight.setdefault(key, [])
        # The backend runs ``width`` batches at a time: this one begins when the oldest has ended.
        behind = held.pop(0) if width and len(held) >= width else []
        preds = tuple(dict.fromkeys((*lane.issues(is_in_host_memory(batch)), *behind)))
        positions = [self._append(c, channel, preds, site) for c in batch]
        if width:
            held.append(positions)
        # A communication in which other ranks really take part gets its values from them.
        absent = [c for c in batch if not self._load.answers(c)]
        workspace = take_workspace(absent) if absent else None

        def fill() -> None:
            for collective in absent:
                self._payload.fill(collective)

        by_host = blocks_host(batch)
        ended = self._device.communicate(key, fill, blocks_host=by_host)
        return Issued(self.stream, positions, by_host, ended, workspace)

    def lane_switched(self, before: str, after: str) -> None:
        """Note that the program computes on another stream from now on."""
        self._spans.switch(before, after)

    def lane_frontier(self, lane: str) -> tuple[int, ...]:
        """Return the nodes that are done when an event recorded on ``lane`` now is reached."""
        with self._spans.paused(lane) as recorded:
            return recorded.issues(by_host=False)

    def lane_waits(self, lane: str, frontier: tuple[int, ...], order: Callable[[], None]) -> None:
        """Make a stream wait for an event, as the program asks, and note the edge."""
        with self._spans.paused(lane) as waiting:
            order()
            waiting.joins(frontier, by_host=False)

    def backward_begins(self) -> None:
        """Label the following spans as backward: a backward pass starts."""
        self._change_phase(BACKWARD)

    def backward_ended(self) -> None:
        """Label the following spans as forward again."""
        self._change_phase(FORWARD)

    def optimizer_begins(self) -> None:
        """Label the following spans as optimizer."""
        self._change_phase(OPTIMIZER)

    def optimizer_ended(self, optimizer: int = 0) -> None:
        """Mark that an optimizer call ended, so a step may end here."""
        self._change_phase(FORWARD)
        self.stream.mark(optimizer)

    def resume(self) -> None:
        """Restart the open span: the time since the last cut was not the program's work."""
        self._spans.restart()

    def finish(self) -> None:
        """Close the span that is open."""
        self._spans.close()

    def _change_phase(self, phase: str) -> None:
        with self._paused():
            self._spans.label = phase

    def _append(self, collective: Collective, lane: str, preds: tuple[int, ...], site: int) -> int:
        group, op = collective.group, collective.op
        kinds = {CollectiveOp.SEND: NodeKind.SEND, CollectiveOp.RECV: NodeKind.RECV}
        return self.stream.append(
            StreamNode(
                kind=kinds.get(op, NodeKind.COLLECTIVE),
                preds=preds,
                lane=self.stream.lanes.id(lane),
                label=self.stream.labels.id(op.spelling),
                op=op,
                group_index=group.group_index,
                peer=peer_of(collective),
                n_bytes=collective.n_bytes,
                site=site,
            )
        )
