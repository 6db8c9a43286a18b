"""Derives which ranks wait for which others from the records of all ranks.

An incomplete call waits for the members of its group that have not made it. If all members have
made it, it waits for those whose stream has not reached it. Members that made another call in its
place will never make it; this is a *mismatch*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from prismscale.formats.flight_recorder.rank_calls import (
    CallColumns,
    CallShape,
    CallState,
    FlightRecord,
    RankCalls,
    RecordedGroup,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingCall:
    """The first call in a group that a rank did not complete."""

    group: RecordedGroup
    seq: int
    shape: CallShape
    site: str
    state: CallState
    peer: int = -1
    """For a send or receive: global rank of the other end; else -1."""
    at: int = 0
    """Number of the rank's recorded calls before it."""

    def sentence(self) -> str:
        """Return the call in words, for messages."""
        return f"{self.shape.sentence()} in group {self.group.label()} ({self.site})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """A call for which members of its group made different calls."""

    group: RecordedGroup
    seq: int
    members_by_shape: dict[CallShape, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The waits in a job that hangs."""

    record: FlightRecord
    pending: dict[int, tuple[PendingCall, ...]] = field(default_factory=dict)
    """Pending calls by waiting rank."""
    awaited: dict[int, frozenset[int]] = field(default_factory=dict)
    """Awaited ranks by waiting rank."""
    mismatches: tuple[Mismatch, ...] = ()

    @cached_property
    def all_awaited(self) -> frozenset[int]:
        """Every rank that some rank waits for."""
        return frozenset().union(*self.awaited.values())


def waiting_of(record: FlightRecord) -> Waiting:
    """Return which ranks wait for which others in ``record``."""
    return _Waits(record).found()


class _Waits:
    """Examines each call of each group once, however many ranks wait in it."""

    def __init__(self, record: FlightRecord) -> None:
        self._record = record
        self._calls = {rank: record.ranks[rank] for rank in record.ranks}
        self._columns: dict[tuple[int, int], _GroupCalls] = {}
        self._places: dict[tuple[int, RecordedGroup], int] = {}
        for rank, calls in self._calls.items():
            for index, group in enumerate(calls.groups):
                self._places[rank, group] = index
        self._absent: dict[tuple[RecordedGroup, int], frozenset[int]] = {}
        self._mismatches: dict[tuple[RecordedGroup, int], Mismatch] = {}

    def found(self) -> Waiting:
        pending, awaited = {}, {}
        for rank, calls in self._calls.items():
            own = tuple(self._pending(calls))
            if own:
                pending[rank] = own
                awaited[rank] = frozenset().union(*(self._awaited(rank, p) for p in own)) - {rank}
        return Waiting(
            record=self._record,
            pending=pending,
            awaited=awaited,
            mismatches=tuple(self._mismatches.values()),
        )

    def _pending(self, calls: RankCalls) -> Iterator[PendingCall]:
        """Yield the first incomplete call in each group; for messages the first with each peer."""
        columns, seen = calls.columns, set()
        for n in np.flatnonzero(columns.state_N < CallState.COMPLETED).tolist():
            group_index, peer = int(columns.group_N[n]), int(columns.peer_N[n])
            shape = self._record.shapes[int(columns.shape_N[n])]
            lane = (group_index, peer, shape.op if shape.is_p2p else "")
            if lane in seen:
                continue
            seen.add(lane)
            group = calls.groups[group_index]
            other = -1
            if shape.is_p2p:
                own = group.ranks.index(calls.rank)
                other = group.ranks[(own + peer) % len(group.ranks)]
            yield PendingCall(
                group=group,
                seq=int(columns.seq_N[n]),
                shape=shape,
                site=self._record.site(int(columns.site_N[n])),
                state=CallState(int(columns.state_N[n])),
                peer=other,
                at=n,
            )

    def _awaited(self, rank: int, call: PendingCall) -> frozenset[int]:
        if call.shape.is_p2p:
            return frozenset({call.peer}) if self._lacks_answer(rank, call) else frozenset()
        key = (call.group, call.seq)
        if key not in self._absent:
            self._absent[key] = self._look_at(call.group, call.seq)
        return self._absent[key]

    def _look_at(self, group: RecordedGroup, seq: int) -> frozenset[int]:
        """Return the members that a call waits for.

        These are members that have not made it, and the smaller side of a mismatch. If there are
        none, these are members whose stream has not reached the call.
        """
        absent, behind = set(), set()
        shapes: dict[CallShape, list[int]] = {}
        for member in group.ranks:
            calls = self._of(member, group)
            at = calls.position(seq) if calls is not None else None
            if calls is None or (at is None and calls.last_seq < seq):
                absent.add(member)
            elif at is not None:
                shape = self._record.shapes[int(calls.columns.shape_N[at])]
                shapes.setdefault(shape, []).append(member)
                if calls.columns.state_N[at] == CallState.SCHEDULED:
                    behind.add(member)
        if _differ(shapes):
            self._mismatches[group, seq] = Mismatch(
                group=group,
                seq=seq,
                members_by_shape={shape: tuple(ranks) for shape, ranks in shapes.items()},
            )
            fewest = min(len(ranks) for ranks in shapes.values())
            absent |= {r for ranks in shapes.values() if len(ranks) == fewest for r in ranks}
        return frozenset(absent or behind)

    def _lacks_answer(self, rank: int, call: PendingCall) -> bool:
        """Whether the message must wait for its peer.

        This is so if the peer has no unfinished call that answers it, or if that call differs in
        size, or if the peer's stream has not reached it although this rank's stream has.
        """
        other = self._calls.get(call.peer)
        if other is None or (call.peer, call.group) not in self._places:
            return True
        columns, index = other.columns, self._places[call.peer, call.group]
        wanted = "recv" if call.shape.op == "send" else "send"
        size = len(call.group.ranks)
        offset = (call.group.ranks.index(rank) - call.group.ranks.index(call.peer)) % size
        open_N = (
            (columns.group_N == index)
            & (columns.peer_N == offset)
            & (columns.state_N < CallState.COMPLETED)
        )
        for n in np.flatnonzero(open_N).tolist():
            answer = self._record.shapes[int(columns.shape_N[n])]
            if answer.op == wanted:
                is_queued = columns.state_N[n] == CallState.SCHEDULED != call.state
                return bool(is_queued) or answer.input_sizes != call.shape.input_sizes
        return True

    def _of(self, rank: int, group: RecordedGroup) -> _GroupCalls | None:
        calls, index = self._calls.get(rank), self._places.get((rank, group))
        if calls is None or index is None:
            return None
        key = (id(calls.columns), index)
        if key not in self._columns:
            self._columns[key] = _GroupCalls(calls.columns, index)
        return self._columns[key]


class _GroupCalls:
    """The collectives of one group in a rank's record."""

    def __init__(self, columns: CallColumns, group_index: int) -> None:
        self.columns = columns
        own = np.flatnonzero((columns.group_N == group_index) & (columns.peer_N < 0))
        self._at = dict(zip(columns.seq_N[own].tolist(), own.tolist(), strict=True))
        self.last_seq = max(self._at, default=0)

    def position(self, seq: int) -> int | None:
        """Return a collective's index among the rank's calls; None if it is not recorded."""
        return self._at.get(seq)


UNEVEN = ("all_to_all", "scatter", "gather", "all_gather_v", "reduce_scatter_v")


def _differ(shapes: dict[CallShape, list[int]]) -> bool:
    """Whether calls of one group's members do not match each other."""
    if len({shape.op for shape in shapes}) > 1:
        return True
    if any(shape.op.startswith(UNEVEN) for shape in shapes):
        return False
    return len(shapes) > 1
