"""The hook of a live rank: real computation, payloads of other live ranks, calibrated waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import Work

from prismscale.durations.source import NEVER
from prismscale.emulation.backends.backend_memory import take_workspace
from prismscale.emulation.hook import Collective
from prismscale.emulation.work import completed, in_flight
from prismscale.errors import StuckError
from prismscale.graph.node import CollectiveOp
from prismscale.host_comm.compute_clock import ProgramTime, RunQueue, since_call_ns
from prismscale.host_comm.local_work import LocalWork, NoWork
from prismscale.live.clock import Clock
from prismscale.live.coordinator.wire import (
    ASK_AFTER_S,
    UNCOVERED_ID_BASE,
    Message,
    MessageKind,
    Wire,
)
from prismscale.live.hook_base import LiveHookBase, StepEnd, combine_with_peers
from prismscale.live.overlap import Overlap
from prismscale.live.recorded_answers import RecordedAnswers
from prismscale.transfers.transfer_load import TransferLoad, TransferWork


@dataclass(kw_only=True)
class Pending:
    """One batch in flight."""

    batch: Sequence[Collective]
    positions: list[int]
    instances: list[str]
    defined: list[bool] = field(default_factory=list)
    """For each communication: whether messages that are really sent define its outputs."""
    transfer: TransferWork | None = None
    workspace: object = None
    """Memory that the backend holds until the end."""
    share: LocalWork = field(default_factory=NoWork)
    """This rank's share of the work."""
    filled: bool = False

    @property
    def is_work_here(self) -> bool:
        """Whether this machine works on the batch while the program goes on."""
        return not isinstance(self.share, NoWork)


@dataclass(kw_only=True)
class LiveHook(LiveHookBase):
    """Answers a live rank's communications from the coordinator's timeline."""

    wire: Wire
    clock: Clock
    overlap: Overlap
    transfers: TransferLoad | None = None
    """Sends and receives what a real rank would; None if nothing is sent."""
    have_links: bool = False
    """Messages go over the target's own links, so the time that they take is no lag."""
    recorded: RecordedAnswers | None = None
    queue: RunQueue = field(default_factory=RunQueue)
    """Measures how long this rank waits for its core, behind the coordinator and live ranks."""
    lag_ns: int = 0
    """Time that the emulation cost so far. It is taken out of logical time."""
    waited_ns: int = 0
    """Logical time spent waiting for communications."""
    phase_factor: float = 1.0
    """Factor of the what-ifs on the program's present phase."""
    _computing_since_ns: int | None = None
    _arrived: tuple[int, int] = (0, 0)
    """When the rank last reached a communication, and how long it had waited by then."""
    _steps: list[StepEnd] = field(default_factory=list)
    _time: ProgramTime = field(default_factory=ProgramTime)
    _at_work: int = 0
    """Number of batches under way that this machine works on."""
    _ends: dict[int, int] = field(default_factory=dict)

    def communicate(self, batch: Sequence[Collective]) -> Work:
        """Tell the coordinator. A synchronous call returns at the calibrated end."""
        self._stop()
        waiting_ns = self._time.waiting_since(self.load)
        # Before computation is stretched: the time since the program's call is ours.
        self._forgive(since_call_ns(batch, self.load))
        self.stretch()
        # The whole batch has one time, because it is issued at once.
        now = self.clock.now_ns()
        pending = Pending(batch=batch, positions=[], instances=[])
        for collective in batch:
            self._arrive(collective, pending, now)
        self._arrived = now, self.waited_ns
        self.count(batch)
        pending.workspace = take_workspace(batch)
        # See [Note: work nobody would notice] in live/overlap.py.
        matters = self.transfers is not None or self.overlap.matters(pending.positions)
        if self.transfers is not None:
            pending.transfer = self.transfers.share(batch, pending.instances)
            pending.share = pending.transfer
        elif matters:
            pending.share = self.load.share(batch)
        self._at_work += pending.is_work_here
        if not batch[0].asynchronous:
            work = completed(tuple(t for c in batch for t in c.outputs))
            pending.share.begin()
            self._complete(pending, now)
            return work

        def wait(_: timedelta | None) -> None:
            called = self.clock.now_ns()
            self._time.stop()
            self._forgive(self.clock.now_ns() - called)
            self.stretch()
            # Part of what the program computed may have been waiting: see [Note: interruptions] in
            # host_comm/compute_clock.py.
            self._complete(pending, self.clock.now_ns() - waiting_ns())

        work = in_flight(batch, wait, lambda: self._is_done(pending))
        self._go(now)
        # This counts as the program's time, because a real enqueue takes as long.
        pending.share.begin()
        if not matters:
            # Nothing was issued here, but a real call takes that long.
            self.clock.wait_until(self.clock.now_ns() + self.overlap.issue_ns)
        return work

    def _arrive(self, collective: Collective, pending: Pending, now: int) -> None:
        now = NEVER if self.hung else now
        position = self.cursor.next_position(collective)
        # Named even if the trace lacks it, because other live ranks count it too.
        instance = self.instances.name(collective)
        peers = self.exchange.peers(collective)
        defined = self.transfers is not None and self.transfers.defines(instance, collective)
        pending.defined.append(defined)
        # Before the arrival is told, so that a rank that it releases finds the tensors there.
        if peers and not defined and collective.op != CollectiveOp.RECV:
            self.exchange.offer(instance, collective, peers)
        if position is None:
            position = UNCOVERED_ID_BASE + self.cursor.uncovered
            text = {
                "op": collective.op.spelling,
                "n_bytes": collective.n_bytes,
                "group_index": collective.group.group_index,
                "ranks": _taking_part(collective),
            }
            self.wire.send(Message(MessageKind.UNCOVERED, position, now, text))
        else:
            self.wire.send(
                Message(MessageKind.ARRIVE, position, now, computed_ns=self._computed_ns(now))
            )
        pending.positions.append(position)
        pending.instances.append(instance)

    def _computed_ns(self, now: int) -> int:
        """Computation since the last communication, at this machine's speed."""
        arrived_ns, waited_ns = self._arrived
        computed_ns = now - arrived_ns - (self.waited_ns - waited_ns)
        return round(computed_ns / self.compute_factor)

    def _complete(self, pending: Pending, began: int) -> None:
        """Fill the outputs while the communication is under way, then wait for its end.

        The program waits since ``began``, which may lie before now: see [Note: interruptions] in
        ``host_comm/compute_clock.py``. The coordinator's end already includes this rank's host work
        as it was captured. Waiting for the real host work as well would take the longer of two
        samples, and make waits too long on average. Host work that outlasts the coordinator's end
        is lag; for a synchronous call that includes its start.
        """
        self._fill(pending, shared=False)
        end = max(self._end_of(p) for p in pending.positions)
        # It was released, so every live member has arrived, and offered its tensors before that.
        self._fill(pending, shared=True)
        pending.filled = True
        pending.share.wait()
        pending.workspace = None
        self._at_work -= pending.is_work_here
        self.clock.wait_until(end)
        due = max(began, end)
        if self.have_links:
            due = max(due, self.clock.now_ns())
        self.waited_ns += due - began
        self._go(due)

    def _fill(self, pending: Pending, *, shared: bool) -> None:
        """Fill the outputs that no message defines.

        ``shared`` selects communications with other live ranks, otherwise those without.
        """
        if pending.filled:
            return
        batch = zip(pending.batch, pending.instances, pending.defined, strict=True)
        for collective, instance, is_defined in batch:
            if is_defined or bool(self.exchange.peers(collective)) != shared:
                continue
            recorded = self.recorded
            if recorded is not None and not recorded.knows(instance, collective):
                recorded = None
            if shared or recorded is not None:
                combine_with_peers(self.exchange, self.payload, instance, collective, recorded)
            else:
                self.payload.fill(collective)

    def _go(self, since: int) -> None:
        """Note that the program runs. Logical time after ``since`` was the emulation's."""
        if self.load.interrupts:
            self.queue.go()
        self._computing_since_ns = since
        self._time.go()
        # Last, because it takes out the time of all this.
        self._forgive(self.clock.now_ns() - since)

    def _stop(self) -> None:
        """Note that the program has made a call.

        If this machine works on none of its communications, the time that the coordinator and other
        live ranks had of its core is lag: a rank on a core of its own would have gone on.
        """
        self._time.stop()
        if self.load.interrupts and not self._at_work:
            self._forgive(self.queue.delayed_ns())

    def stretch(self) -> None:
        """Make the computation since the last communication count :attr:`compute_factor` times.

        Computation before the first communication is start-up and stays as it is.
        """
        since, factor = self._computing_since_ns, self.compute_factor * self.phase_factor
        if factor == 1.0 or since is None:
            return
        now = self.clock.now_ns()
        extra = round((factor - 1) * (now - since))
        if extra < 0:
            # A faster target is no lag, and lag would be reported.
            self.clock.forgive(-extra)
        else:
            self.clock.wait_until(now + extra)
        self._computing_since_ns = self.clock.now_ns()

    def enter_phase(self, factor: float) -> None:
        """Let later computation take ``factor`` times as long, besides :attr:`compute_factor`."""
        if factor == self.phase_factor:
            return
        self.stretch()
        if self._computing_since_ns is not None:
            self._computing_since_ns = self.clock.now_ns()
        self.phase_factor = factor

    def step_ended(self) -> None:
        """Note that the program is at the end of a steady step."""
        self._stop()
        self.stretch()
        now = self.clock.now_ns()
        self._steps.append(StepEnd(now, self.waited_ns, self.lag_ns))
        if len(self._steps) > 1:
            before, ended = self._steps[-2:]
            computed = ended.end_ns - before.end_ns - (ended.waited_ns - before.waited_ns)
            self.wire.send(Message(MessageKind.COMPUTED, 0, round(computed / self.compute_factor)))
        # The time that the message took belongs to no step.
        self._go(now)

    def finish(self) -> list[StepEnd]:
        """Return the ends of all steady steps."""
        return self._steps

    def close(self) -> None:
        """Release what the hook holds: nothing outlives the program."""
        if self.transfers is not None:
            self.transfers.close()
        self.queue.close()

    def _forgive(self, lag_ns: int) -> None:
        """Take time that only the emulation needed out of the rank's logical time."""
        if lag_ns > 0:
            self.clock.forgive(lag_ns)
            self.lag_ns += lag_ns

    def _is_done(self, pending: Pending) -> bool:
        self._read(0.0)
        if not self._has_ends(pending):
            return False
        now = self.clock.now_ns()
        has_come = pending.transfer is None or pending.transfer.is_over()
        return has_come and all(self._ends[p] <= now for p in pending.positions)

    def _has_ends(self, pending: Pending) -> bool:
        """Whether the coordinator has told when all of it ends."""
        return all(p in self._ends for p in pending.positions)

    def _end_of(self, position: int) -> int:
        while position not in self._ends:
            if not self._read(ASK_AFTER_S):
                self.wire.send(Message(MessageKind.WHY, position, self.clock.now_ns()))
        return self._ends.pop(position)

    def _read(self, timeout_s: float) -> bool:
        messages = self.wire.receive(timeout_s)
        if messages is None:
            raise StuckError("the coordinator ended; its log says why")
        for message in messages:
            if message.kind == MessageKind.RELEASE:
                self._ends[message.position] = message.time_ns
            elif message.kind == MessageKind.FAULT:
                text = message.text or {}
                raise StuckError(str(text.get("summary", "the communication never ends")))
        return bool(messages)


def _taking_part(collective: Collective) -> list[int]:
    """Global ranks of a communication, a message's source first."""
    group = collective.group
    if not collective.op.is_p2p:
        return list(group.ranks)
    ends = [group.ranks[group.group_rank], group.ranks[collective.root]]
    return ends if collective.op == CollectiveOp.SEND else ends[::-1]
