"""Paces one live rank's device: ``python -m prismscale.live.pacer.pacer_process SPEC``.

The pacer reads from the counters when the device reached each point, and tells the coordinator of
arrivals. It opens each gate when logical time has reached the communication's end.
:mod:`.shared_words` says why this is a process.

*Logical* time is the monotonic clock minus an origin. The origin moves by the time that only the
emulation cost: if a stream waited for a communication and went on after its end, the emulation held
it up for the difference. The origin moves in program order, for the rank as a whole: a stream that
did not wait joins the one that did before the difference matters.
"""

from __future__ import annotations

import heapq
import json
import select
import socket
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Protocol

from prismscale.durations.source import NEVER
from prismscale.graph.node import CollectiveOp
from prismscale.live.coordinator.wire import (
    ASK_AFTER_S,
    UNCOVERED_ID_BASE,
    Message,
    MessageKind,
    Wire,
)
from prismscale.live.pacer.counters import ContiguousPrefix, CounterTimes
from prismscale.live.pacer.pacer_spec import PacerSpec
from prismscale.live.pacer.shared_words import (
    OPEN,
    RECORD_BYTES,
    Point,
    Record,
    SharedWords,
    WordKind,
)
from prismscale.processes.children import die_with_parent
from prismscale.typed_files import decode

KEPT_LATE = 4096
"""Number of latest gates whose delay is remembered."""
IDLE_AFTER_NS = 100_000_000
"""The pacer polls without a pause until nothing has happened for this long."""
IDLE_S = 100e-6
"""Pause between polls from then on; a message ends it."""


class RankLink(Protocol):
    """The pacer's connection to the live rank."""

    def records(self) -> Sequence[Record] | None:
        """Records that came since the last call; None when the rank is gone. Never blocks."""
        ...

    def answer(self, body: dict[str, Any]) -> None:
        """Send the rank one message, for example a ``fault`` or the steps that were seen."""
        ...


@dataclass(kw_only=True, slots=True)
class Batch:
    """Communications that were issued together."""

    unanswered: set[int] = field(default_factory=set)
    issued: bool = False
    end_ns: int = 0


@dataclass(kw_only=True)
class Pacer:
    """Paces one live rank. Each pass looks at counters, records, the coordinator and due gates."""

    words: SharedWords
    link: RankLink
    """Connection to the live rank."""
    wire: Wire
    origin_ns: int
    compute_factor: float = 1.0
    waited_ns: int = 0
    lag_ns: int = 0
    finished: bool = False
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """For each steady step: its logical end, and the total wait and lag by then."""
    late_ns: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_LATE))
    """How long after the communication's end each of the latest gates was opened."""

    def __post_init__(self) -> None:
        self._times = CounterTimes(self.words)
        self._gates, self._answers = (
            ContiguousPrefix(self.words.gates),
            ContiguousPrefix(self.words.answers),
        )
        self._arrivals: dict[int, deque[Record]] = {}
        self._order: deque[Record] = deque()
        self._batches: dict[Point, Batch] = {}
        self._batch_of: dict[int, Point] = {}
        self._due: list[tuple[int, Point]] = []
        self._uncovered = 0
        self._computing_since_ns: int | None = None
        self._asked_ns = 0
        self._busy_ns = 0

    def poll(self, now_ns: int) -> None:
        """Make one pass."""
        if self._times.look(now_ns):
            self._busy_ns = now_ns
        records = self.link.records()
        if records is None:
            self.finished = True
            return
        for record in records:
            self._busy_ns = now_ns
            self._accept(record)
        while self._order and self._advance(self._order[0], now_ns):
            self._order.popleft()
        for queue in self._arrivals.values():
            while queue and self._report(queue[0]):
                queue.popleft()
        self._hear()
        self._open_due(now_ns)

    def is_idle(self, now_ns: int) -> bool:
        """Whether nothing is expected within the next moments."""
        expected = self._order or self._due or any(self._arrivals.values())
        return not expected and now_ns - self._busy_ns > IDLE_AFTER_NS

    def fail(self, text: str) -> None:
        """Let the device run free and tell the rank why."""
        self.words.gates[:] = OPEN
        self.words.answers[:] = OPEN
        # This comes last: a rank that sees its answers open waits for this line.
        self.link.answer({"fault": text})
        self.finished = True

    def _accept(self, record: Record) -> None:
        if record.kind in (WordKind.ARRIVE, WordKind.UNCOVERED):
            if record.kind == WordKind.UNCOVERED:
                self._uncovered += 1
                record = record._replace(position=UNCOVERED_ID_BASE + self._uncovered)
            batch = self._batches.setdefault(record.gate, Batch())
            batch.unanswered.add(record.position)
            self._batch_of[record.position] = record.gate
            self._arrivals.setdefault(record.group_index, deque()).append(record)
        elif record.kind == WordKind.ISSUED:
            self._batches[record.gate].issued = True
            self._answered(record.gate, self._batches[record.gate])
        else:
            self._order.append(record)

    def _report(self, record: Record) -> bool:
        """Report an arrival to the coordinator if the device has reached it; return whether it has.

        A group's communications are reported in program order, whatever streams they come from,
        because the coordinator counts them.
        """
        reached = self._times.at(record.at)
        if reached is None:
            return False
        now = NEVER if record.hung else reached - self.origin_ns
        if record.kind == WordKind.ARRIVE:
            self.wire.send(Message(MessageKind.ARRIVE, record.position, now))
        else:
            op = CollectiveOp(record.op).spelling
            text = {"op": op, "n_bytes": record.n_bytes, "group_index": record.group_index}
            self.wire.send(Message(MessageKind.UNCOVERED, record.position, now, text))
        return True

    def _hear(self) -> None:
        messages = self.wire.receive(0.0)
        if messages is None:
            self.fail("the coordinator ended; its log says why")
            return
        for message in messages:
            if message.kind == MessageKind.RELEASE:
                gate = self._batch_of.pop(message.position)
                batch = self._batches[gate]
                batch.unanswered.discard(message.position)
                batch.end_ns = max(batch.end_ns, message.time_ns)
                self._answered(gate, batch)
            elif message.kind == MessageKind.FAULT:
                text = message.text or {}
                self.fail(str(text.get("summary", "the communication never ends")))

    def _answered(self, gate: Point, batch: Batch) -> None:
        if batch.issued and not batch.unanswered:
            # The end is known, so the host may go on. The stream may go on when the end has come.
            self._answers.pass_(gate)
            heapq.heappush(self._due, (batch.end_ns, gate))

    def _open_due(self, now_ns: int) -> None:
        # Ends are kept in logical time, because the origin moves.
        while self._due and self._due[0][0] + self.origin_ns <= now_ns:
            end_ns, gate = heapq.heappop(self._due)
            self._gates.pass_(gate)
            self.late_ns.append(now_ns - self.origin_ns - end_ns)

    def _advance(self, record: Record, now_ns: int) -> bool:
        """Act on the next record in program order; False while the device is not there yet."""
        if record.kind == WordKind.END:
            self._end()
            return True
        reached = self._times.at(record.at)
        if reached is None:
            return False
        if record.kind == WordKind.STEP:
            self.steps.append((reached - self.origin_ns, self.waited_ns, self.lag_ns))
        elif record.kind == WordKind.STRETCH:
            self._stretch(record.gate, reached)
        else:
            after = self._times.at(Point(record.at.word, record.at.value + 1))
            if after is None:
                self._ask(record.gate, now_ns)
                return False
            self._join(self._batches.pop(record.gate), reached, after)
        return True

    def _join(self, batch: Batch, before: int, after: int) -> None:
        arrived = before - self.origin_ns
        due = max(arrived, batch.end_ns)
        lag = after - self.origin_ns - due
        # The lag may be negative, by the error of the two times. It stays negative, so that errors
        # cancel out over a step.
        self.origin_ns += lag
        self.lag_ns += lag
        self.waited_ns += due - arrived
        self._computing_since_ns = after
        self._asked_ns = 0

    def _stretch(self, gate: Point, reached: int) -> None:
        since = self._computing_since_ns
        extra = 0 if since is None else round((self.compute_factor - 1) * (reached - since))
        if extra < 0:
            self.origin_ns -= extra
        heapq.heappush(self._due, (reached - self.origin_ns + max(0, extra), gate))
        self._computing_since_ns = reached + max(0, extra)

    def _ask(self, gate: Point, now_ns: int) -> None:
        """Ask the coordinator from time to time whether an awaited communication ever ends."""
        unanswered = self._batches[gate].unanswered
        if self._asked_ns == 0 or not unanswered:
            self._asked_ns = now_ns
        elif now_ns - self._asked_ns > ASK_AFTER_S * 1e9:
            self._asked_ns = now_ns
            self.wire.send(Message(MessageKind.WHY, min(unanswered), now_ns - self.origin_ns))

    def _end(self) -> None:
        late = sorted(self.late_ns) or [0]
        self.link.answer(
            {
                "steps": self.steps,
                "late_ns": {"median": late[len(late) // 2], "max": late[-1]},
            }
        )
        self.finished = True


class SocketLink:
    """Connection to the live rank over a stream socket (a :class:`RankLink`)."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()

    def fileno(self) -> int:
        """The socket's descriptor, for select."""
        return self._connection.fileno()

    def records(self) -> Sequence[Record] | None:
        """Complete records that have come; None when the rank is gone."""
        try:
            chunk = self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return ()
        if not chunk:
            return None
        self._buffer += chunk
        whole = len(self._buffer) // RECORD_BYTES * RECORD_BYTES
        records = Record.unpack(self._buffer[:whole])
        del self._buffer[:whole]
        return records

    def answer(self, body: dict[str, Any]) -> None:
        """Send one line of JSON."""
        self._connection.sendall(json.dumps(body).encode() + b"\n")


def pace(pacer: Pacer, link: SocketLink) -> None:
    """Run until the rank has ended, then open every gate. Errors open them too."""
    try:
        while not pacer.finished:
            now = perf_counter_ns()
            pacer.poll(now)
            if pacer.is_idle(now):
                select.select([link.fileno(), pacer.wire.fileno()], [], [], IDLE_S)
    finally:
        pacer.words.gates[:] = OPEN
        pacer.words.answers[:] = OPEN


def main(arguments: list[str]) -> int:
    """Entry of the process; returns its exit code."""
    die_with_parent()
    spec = decode(PacerSpec, json.loads(arguments[0]), "the pacer's argument")
    link = SocketLink(socket.socket(fileno=spec.link))
    pacer = Pacer(
        words=SharedWords.open(Path(spec.words)),
        link=link,
        wire=Wire(socket.socket(fileno=spec.wire)),
        origin_ns=spec.origin_ns,
        compute_factor=spec.compute_factor,
    )
    link.answer({"ready": True})
    try:
        pace(pacer, link)
    except (BrokenPipeError, ConnectionResetError):
        # The rank or the coordinator ended first. The rank finds its gates open and says so.
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
