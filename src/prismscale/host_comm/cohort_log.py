"""Durations of a slice's communications, from the logs of its ranks.

Logs use the monotonic clock, which is the same for all processes of a machine.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prismscale.emulation.backends.backend_order import GLOO_THREADS
from prismscale.host_comm.transport import End


@dataclass(kw_only=True, slots=True)
class Entry:
    """One communication, as one member of it saw it."""

    channel: str
    """Communications of one channel meet in order; see :class:`InstanceIds`."""
    name: str
    """Name of the communication, the same on every member."""
    kind: str
    """Communications of one kind take about the same time."""
    members: int
    """Number of ranks that take part."""
    is_message: bool
    receives: bool
    arrived_ns: int = 0
    ended_ns: int = 0
    """0 until the communication has ended."""
    is_met: bool = False
    """True if the program waited for the end: ``ended_ns`` is when it ran again."""
    is_exact: bool = True
    """False if the communication was over when the program came to wait: it ended earlier."""

    def ended(self, now_ns: int, how: End) -> None:
        """Note the end. A waiting program notices it later than gloo, and its time is kept."""
        if how is not End.NOTICED or not self.ended_ns:
            self.ended_ns = now_ns
            self.is_met, self.is_exact = how is End.MET, how is not End.FOUND


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A communication's end on the first member, and its duration since the last arrival."""

    ended_ns: int
    took_ns: int


def durations_ns(logs: Iterable[Sequence[Entry]]) -> dict[str, Span]:
    """Duration of each communication, by name: from its last arrival to its first end.

    A message ends where it is received. If no member knows the exact end, the duration is the
    median of its kind, but no longer than observed. ``logs`` hold each rank's entries in the order
    of arrival. A communication is left out if a member never arrived or nobody noted its end.
    """
    met: dict[str, list[tuple[Entry, int]]] = defaultdict(list)
    for log in logs:
        for entry, began_ns in _begun(log):
            met[entry.name].append((entry, began_ns))
    spans: dict[str, Span] = {}
    at_most: dict[str, tuple[str, Span]] = {}
    by_kind: dict[str, list[int]] = defaultdict(list)
    for name, seen in met.items():
        kind, last_ns = seen[0][0].kind, max(began_ns for _, began_ns in seen)
        ends = [e for e, _ in seen if e.ended_ns and (e.receives or not e.is_message)]
        if len(seen) < seen[0][0].members or not ends:
            continue
        exact = [e.ended_ns for e in ends if e.is_exact]
        # The first member to notice counts: the others had to wake up as well.
        ended_ns = min(exact or [e.ended_ns for e in ends])
        # At least 1: a duration of 0 would say that nothing was measured.
        span = Span(ended_ns=ended_ns, took_ns=max(1, ended_ns - last_ns))
        if exact:
            spans[name] = span
            by_kind[kind].append(span.took_ns)
        else:
            # Every member that came to wait found it over: it took no longer than that.
            at_most[name] = kind, span
    for name, (kind, span) in at_most.items():
        typical_ns = round(np.median(by_kind.get(kind, [span.took_ns])))
        spans[name] = replace(span, took_ns=min(span.took_ns, typical_ns))
    return spans


def _begun(log: Sequence[Entry]) -> Iterator[tuple[Entry, int]]:
    """Entries of one rank's log, each with the time (ns) at which gloo could begin it.

    gloo runs :data:`GLOO_THREADS` collectives of a group at a time. The graph's edges say so too.
    """
    running: dict[str, deque[int]] = {}
    for entry in log:
        # gloo keeps no order of messages, so none waits for a thread.
        if entry.is_message:
            yield entry, entry.arrived_ns
            continue
        ends_ns = running.setdefault(entry.channel, deque([0] * GLOO_THREADS, GLOO_THREADS))
        yield entry, max(entry.arrived_ns, ends_ns[0])
        ends_ns.append(entry.ended_ns)
