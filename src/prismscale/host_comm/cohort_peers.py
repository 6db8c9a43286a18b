"""Communications that the ranks of a slice really make with each other.

[Note: slices that communicate] A rank that is captured alone does its share of a communication with
itself (:mod:`prismscale.host_comm.local_work`): on one core, with no peer to wait for. On a target
whose processors communicate, that has neither the duration nor the wake-ups of a real
communication. So ranks that fit the local cores run the program again as a *slice*, side by side.
They communicate for real wherever all members belong to the slice (PrismLLM, section 4.2): real
tensors, in gloo, at the program's own calls. Communications with other ranks are answered as in any
capture.

A communication's duration is the time after its last arrival, and each member knows only its own
arrival. So each rank keeps a log (:mod:`.cohort_log`), and when the program has ended the ranks
read each other's logs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import perf_counter_ns, thread_time_ns  # by name: a program's ``time`` may be logical
from typing import Any

import numpy as np
from torch.distributed import FileStore, PrefixStore

from prismscale.emulation.hook import Collective
from prismscale.emulation.instance_ids import InstanceIds
from prismscale.errors import StuckError
from prismscale.files import await_file, write_text
from prismscale.host_comm.cohort_log import Entry, durations_ns
from prismscale.host_comm.local_work import CommunicationLoad, DurationCallback, LocalWork
from prismscale.host_comm.shared_jitter import Spans, shared_jitter
from prismscale.host_comm.transport import COMPUTES_NS, Transfer, connect, prepare, start

PATIENCE_S = 120.0
"""How long a rank whose program has ended waits for the other ranks of its slice."""
_POLL_S = 0.01

Tell = Callable[[int, int], None]
"""Called with a communication's duration, and with how much later the program ran again (ns)."""


class CohortLoad:
    """Communicates with the other ranks of the slice; ``alone`` does all other communications."""

    interrupts = True

    def __init__(self, rank: int, slice_: Sequence[int], folder: Path, alone: CommunicationLoad):
        """``folder`` belongs to the slice: its ranks find each other and leave their logs there."""
        self._rank, self._slice, self._folder = rank, frozenset(slice_), folder
        self._alone = alone
        self._interface = os.environ.get("GLOO_SOCKET_IFNAME")
        self._instances = InstanceIds()
        self._contexts: dict[str, Any] = {}
        self._meetings: dict[str, Meeting] = {}
        self._log: list[tuple[Entry, Tell]] = []
        self.issues_ns: list[int] = []
        """Time that each issue took from the program's thread."""
        self.watched: set[str] = set()
        """Kinds of communications whose ends gloo is asked to report."""
        self.common_jitter = 0.0
        """Correlation of this rank's jitter with that of the other ranks at the same time."""

    def group_created(
        self, ranks: tuple[int, ...], name: str, backend: str, group_index: int | None
    ) -> None:
        """Name the group for the ranks of the slice."""
        self._instances.group_created(ranks, name, backend, group_index)

    def answers(self, collective: Collective) -> bool:
        """Whether all ranks that take part belong to the slice."""
        taking_part = participants(collective)
        return len(taking_part) > 1 and self._slice.issuperset(taking_part)

    def share(self, batch: Sequence[Collective], took: DurationCallback | None = None) -> LocalWork:
        """Return the slice's own communications, with this rank's share of the rest."""
        together = [i for i, c in enumerate(batch) if self.answers(c)]
        rest = [i for i in range(len(batch)) if i not in together]
        shares: list[LocalWork] = [self._made(batch[i], _told(took, i)) for i in together]
        if rest:
            shares.append(self._alone.share([batch[i] for i in rest], _told_of(took, rest)))
        return shares[0] if len(shares) == 1 else CombinedWork(shares)

    def _made(self, collective: Collective, took: Tell) -> LocalWork:
        op, ranks = collective.op, participants(collective)
        entry = Entry(
            channel=self._instances.channel(collective),
            name=self._instances.name(collective),
            kind=f"{'message' if op.is_p2p else op.spelling} of {collective.n_bytes}",
            members=len(ranks),
            is_message=op.is_p2p,
            receives=bool(collective.outputs),
        )
        self._log.append((entry, took))
        # A message's context has only its two ends, and numbers them anew.
        if ranks != collective.group.ranks:
            peer = collective.group.ranks[collective.root]
            collective = replace(collective, root=ranks.index(peer))
        name = f"{self._instances.group(collective.group.group_index)}.{'-'.join(map(str, ranks))}"
        if op.is_p2p and (meeting := self._meeting(name, ranks)) is not None:
            return meeting.work(partial(PeerWork, self, collective, entry))
        return PeerWork(self, collective, entry, self._context(name, ranks))

    def _context(self, name: str, ranks: tuple[int, ...]) -> Any:
        """The context of ``ranks``, which they make together at its first use."""
        if name not in self._contexts:
            meeting = self._meetings.get(name)
            context = meeting.context() if meeting else self._connected(name, ranks)
            self._contexts[name] = context
        return self._contexts[name]

    def _meeting(self, name: str, ranks: tuple[int, ...]) -> Meeting | None:
        """The making of a message's context, until it is made.

        A program goes on meanwhile: in a ring each rank sends to the next before it receives, so
        ranks that waited here for the next one would wait for each other.
        """
        if name in self._contexts:
            return None
        if name not in self._meetings:
            self._meetings[name] = Meeting(partial(self._connected, name, ranks))
        meeting = self._meetings[name]
        if not meeting.is_over():
            return meeting
        self._contexts[name] = meeting.context()
        return None

    def _connected(self, name: str, ranks: tuple[int, ...]) -> Any:
        store = PrefixStore(name, FileStore(str(self._folder / "rendezvous")))
        return connect(store, ranks.index(self._rank), len(ranks), interface=self._interface)

    @property
    def issue_ns(self) -> int:
        """Median time that issuing a communication takes from the program's thread."""
        return int(np.median(self.issues_ns)) if self.issues_ns else 0

    def resolve_durations(self, spans: Spans) -> None:
        """Find each communication's duration and the common jitter, once the program has ended.

        ``spans`` is this rank's computation.

        Raises:
            StuckError: a rank of the slice does not come to its end.
        """
        np.save(self._spans_path(self._rank), spans.table())
        own = [entry for entry, _ in self._log]
        lines = (json.dumps(asdict(entry)) for entry in own)
        write_text(self._path(self._rank), "\n".join(lines))
        logs = [own if r == self._rank else self._read(r) for r in sorted(self._slice)]
        # Each rank writes its spans before its log.
        others = [np.load(self._spans_path(r)) for r in self._slice if r != self._rank]
        self.common_jitter = shared_jitter(spans, [Spans.from_table(o) for o in others])
        made = durations_ns(logs)
        for entry, took in self._log:
            if entry.name in made:
                span = made[entry.name]
                # The program has ended: see [Note: when a node is final] in capture/node_stream.py.
                took(span.took_ns, max(0, entry.ended_ns - span.ended_ns) if entry.is_met else 0)

    def _path(self, rank: int) -> Path:
        return self._folder / f"communications-{rank}.jsonl"

    def _spans_path(self, rank: int) -> Path:
        return self._folder / f"spans-{rank}.npy"

    def _read(self, rank: int) -> list[Entry]:
        path = self._path(rank)
        if not await_file(path, PATIENCE_S, poll_s=_POLL_S):
            raise StuckError(
                f"rank {self._rank} has ended its captured steps and rank {rank}, captured "
                f"beside it, has not within {PATIENCE_S:.0f} s"
            )
        return [Entry(**json.loads(line)) for line in path.read_text().splitlines()]


class PeerWork:
    """One communication within the slice."""

    def __init__(
        self, load: CohortLoad, collective: Collective, entry: Entry, context: Any
    ) -> None:
        self._load, self._entry = load, entry
        self._calls = prepare(context, collective)
        self._transfer = Transfer(entry.ended, watched=entry.kind in load.watched)
        self.wait, self.is_over = self._transfer.wait, self._transfer.is_over

    def begin(self) -> None:
        """Arrive, and start the communication."""
        # Directly before the call: time in between would count as communication.
        self._entry.arrived_ns, own_ns = perf_counter_ns(), thread_time_ns()
        self._transfer.begin(start(self._calls))
        self._load.issues_ns.append(thread_time_ns() - own_ns)

    def waited(self, since_issue: bool) -> None:
        """Note the end, and decide whether gloo reports the end of the next one of this kind.

        It does not if the program waits at once: the report would be work on the core that is
        timed.
        """
        self._transfer.waited(since_issue)
        entry = self._entry
        if not entry.is_exact and perf_counter_ns() - entry.arrived_ns > COMPUTES_NS:
            self._load.watched.add(entry.kind)


class Meeting:
    """Two ranks connect, in a thread of its own; their messages until then start after that."""

    def __init__(self, connected: Callable[[], Any]) -> None:
        # One thread: messages between two ranks start in the order in which they were issued.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="meeting")
        self._context = self._thread.submit(connected)
        self._n_made = 0
        self._issued: list[Future[PeerWork]] = []

    def work(self, make: Callable[[Any], PeerWork]) -> MeetingWork:
        """A message, which ``make`` makes with the context."""
        self._n_made += 1
        return MeetingWork(self, make)

    def then(self, call: Callable[[Any], PeerWork]) -> Future[PeerWork]:
        """Call with the context when the ranks have connected."""
        self._issued.append(self._thread.submit(lambda: call(self._context.result())))
        return self._issued[-1]

    def is_over(self) -> bool:
        """Whether the ranks have connected and all their messages so far have started."""
        all_issued = len(self._issued) == self._n_made
        return self._context.done() and all_issued and all(w.done() for w in self._issued)

    def context(self) -> Any:
        """Wait for the ranks to connect, and for messages that were issued to start."""
        for work in self._issued:
            work.result()
        return self._context.result()


class MeetingWork:
    """A message between ranks that may still be connecting; ``make`` is called with a context."""

    def __init__(self, meeting: Meeting, make: Callable[[Any], PeerWork]) -> None:
        self._meeting, self._make = meeting, make

    def begin(self) -> None:
        """Let the message start when the ranks have connected: only then has this one arrived."""
        self._begun = self._meeting.then(self._start)

    def _start(self, context: Any) -> PeerWork:
        work = self._make(context)
        work.begin()
        return work

    def wait(self) -> None:
        """Wait until it is over."""
        self._begun.result().wait()

    def is_over(self) -> bool:
        """Whether it has started and is over."""
        return self._begun.done() and self._begun.result().is_over()

    def waited(self, since_issue: bool) -> None:
        """Note the end."""
        self._begun.result().waited(since_issue)


class CombinedWork:
    """A batch's communications within the slice and the rest, as one work."""

    def __init__(self, shares: Sequence[LocalWork]) -> None:
        self._shares = shares

    def begin(self) -> None:
        """Start all, and first those that other ranks wait for."""
        for share in self._shares:
            share.begin()

    def wait(self) -> None:
        """Wait for all."""
        for share in self._shares:
            share.wait()

    def is_over(self) -> bool:
        """Whether all are over."""
        return all(share.is_over() for share in self._shares)

    def waited(self, since_issue: bool) -> None:
        """Note all ends."""
        for share in self._shares:
            share.waited(since_issue)


def participants(collective: Collective) -> tuple[int, ...]:
    """Global ranks that take part, in the order of their context.

    A message's two ends have a context of their own, unless the group has no other members.
    """
    group = collective.group
    if not collective.op.is_p2p or group.size == 2:
        return group.ranks
    return tuple(group.ranks[i] for i in sorted((group.group_rank, collective.root)))


def _told(took: DurationCallback | None, index: int) -> Tell:
    if took is None:
        return lambda ns, late_ns: None
    return lambda ns, late_ns: took(ns, index, late_ns)


def _told_of(took: DurationCallback | None, indices: Sequence[int]) -> DurationCallback | None:
    """A callback for the communications of a batch at ``indices``, made from the batch's own."""
    if took is None:
        return None

    def tell(ns: int, index: int | None = None, late_ns: int = 0, /) -> None:
        for i in indices if index is None else [indices[index]]:
            took(ns, i, late_ns)

    return tell
