"""The verdict on a job that hangs: which ranks caused it, with which call, at which line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from prismscale.diagnosis.deviation import Deviation, Token, deviations
from prismscale.diagnosis.expected import ExpectedCalls
from prismscale.diagnosis.waiting import Mismatch, PendingCall, Waiting, waiting_of
from prismscale.formats.flight_recorder.rank_calls import CallShape, FlightRecord
from prismscale.sim.stuck import what_ranks, who_waits

MOST_COMPARED = 512
"""Maximum number of ranks that are compared with a run."""
MOST_WAITS = 6
"""Maximum number of lines about waiting ranks."""


class Cause(Enum):
    """The cause of a hang."""

    NOTHING = "nothing waits"
    LEFT_OUT = "left out a call"
    ADDED = "made a call in addition"
    SWAPPED = "made two calls in the other order"
    SIZE = "passed another size"
    OTHER_CALL = "made another call"
    NO_RECORD = "left no record"
    BEHIND = "did not come"
    CIRCLE = "wait for each other"


@dataclass(frozen=True, kw_only=True, slots=True)
class HangFinding:
    """Which ranks caused a hang, and how."""

    cause: Cause
    culprits: tuple[int, ...] = ()
    site: str = ""
    """The line of the call that is missing, added or different from that of similar ranks."""
    stands_at: str = ""
    """The line of the culprits' last call."""
    explanation: str = ""
    waits: tuple[str, ...] = ()
    """Which ranks wait in which call, in words; the calls in which most ranks wait first."""
    n_waiting: int = 0

    def text(self) -> str:
        """Return a few lines for the user."""
        if self.cause is Cause.NOTHING:
            return self.explanation
        lines = [self.explanation]
        if self.waits:
            lines.append(f"{self.n_waiting:,} ranks wait:")
            lines += [f"  {wait}" for wait in self.waits]
        return "\n".join(lines)


def diagnose(record: FlightRecord, expected: ExpectedCalls | None = None) -> HangFinding:
    """Find the cause of the hang that left ``record``.

    Args:
        record: the last calls of every rank.
        expected: the ranks' programs in a run of the same job.
    """
    waiting = waiting_of(record)
    if not waiting.pending:
        return HangFinding(
            cause=Cause.NOTHING,
            explanation="no recorded call is unfinished: no rank waits for another",
        )
    involved = _involved(waiting)
    finding = (
        _of_deviation(record, waiting, deviations(record, involved))
        or _of_program(waiting, involved, expected)
        or _of_mismatch(record, waiting)
        or _of_roots(record, waiting)
        or _of_circle(record, waiting)
    )
    return finding if expected is None else _placed(finding, expected)


def _placed(finding: HangFinding, expected: ExpectedCalls) -> HangFinding:
    """Add to ``finding`` where the first culprit stands in the run's program."""
    call = expected.next_call(finding.culprits[0])
    if call is None or finding.cause in (Cause.NO_RECORD, Cause.NOTHING):
        return finding
    made = f", and it called {call.differs}" if call.differs else ""
    line = f"in the run, rank {finding.culprits[0]} calls {call.words} next{made}"
    return replace(finding, explanation=f"{finding.explanation}\n{line}")


def _of_program(
    waiting: Waiting, involved: set[int], expected: ExpectedCalls | None
) -> HangFinding | None:
    """Find ranks that deviate from their program in a run of the same job."""
    if expected is None:
        return None
    found = [
        (rank, call)
        for rank in sorted(involved)[:MOST_COMPARED]
        if (call := expected.next_call(rank)) is not None and call.differs
    ]
    if not found or len(found) == len(involved):
        return None
    rank, call = found[0]
    return _finding(
        waiting,
        Cause.OTHER_CALL,
        tuple(rank for rank, _ in found),
        f"rank {rank} called {call.differs}, where the run calls {call.words}",
        site=call.site,
        stands_at=_stands_at(waiting.record, rank),
    )


def _involved(waiting: Waiting) -> set[int]:
    """Return the ranks that others wait for, and those that disagree about a call."""
    disagree = {
        rank for m in waiting.mismatches for them in m.members_by_shape.values() for rank in them
    }
    return disagree | waiting.all_awaited


def _of_deviation(
    record: FlightRecord, waiting: Waiting, found: Sequence[Deviation]
) -> HangFinding | None:
    if not found:
        return None
    culprits = tuple(sorted(rank for d in found for rank in d.ranks))
    d = min(found, key=lambda d: min(d.ranks))
    own, usual = d.own[d.at], d.usual[d.at]
    own_site = record.site(d.own_sites[d.at])
    usual_site = record.site(d.usual_sites[d.at])
    cause = _cause(record, d)
    who, likes = (
        what_ranks(culprits),
        f"{len(d.likes):,} like {'it' if len(culprits) == 1 else 'them'}",
    )
    calls = _call(record, usual)
    does = f"{_call(record, own)} ({own_site})"
    if cause is Cause.LEFT_OUT:
        said = f"{who} left out {calls} ({usual_site}), which {likes} called, and went on to {does}"
    elif cause is Cause.ADDED:
        said = f"{who} called {does} in addition, where {likes} went on to {calls} ({usual_site})"
    elif cause is Cause.SWAPPED:
        said = f"{who} called {does} before {calls} ({usual_site}); {likes} call them the other way"
    else:
        said = f"{who} called {does}, where {likes} called {calls} ({usual_site})"
    added = cause in (Cause.ADDED, Cause.SIZE, Cause.OTHER_CALL)
    return _finding(
        waiting,
        cause,
        culprits,
        said,
        site=own_site if added else usual_site,
        stands_at=_stands_at(record, culprits[0]),
    )


def _cause(record: FlightRecord, d: Deviation) -> Cause:
    own, usual = d.own[d.at :], d.usual[d.at :]
    if own[0].role == usual[0].role and _op(record, own[0]) == _op(record, usual[0]):
        if own[0].peer != usual[0].peer:
            return Cause.OTHER_CALL
        # A call from another line is another call. If ``own[0]`` once came right after
        # ``usual[0]``, then ``usual[0]`` was left out.
        same_line = d.own_sites[d.at] == d.usual_sites[d.at]
        if same_line and not _followed(d.usual, usual[0], own[0], d.at):
            return Cause.SIZE
    if own[1:2] == usual[:1] and usual[1:2] == own[:1]:
        return Cause.SWAPPED
    if usual[1:2] == own[:1] or _followed(d.usual, usual[0], own[0], d.at):
        return Cause.LEFT_OUT
    if own[1:2] == usual[:1]:
        return Cause.ADDED
    return Cause.OTHER_CALL


def _followed(word: Sequence[Token], first: Token, second: Token, before: int) -> bool:
    """Whether ``second`` came right after ``first`` in an earlier step.

    Earlier steps have the same calls as the step in which no rank came further.
    """
    return any(word[n] == first and word[n + 1] == second for n in range(max(before - 1, 0)))


def _of_mismatch(record: FlightRecord, waiting: Waiting) -> HangFinding | None:
    """Find members of a group whose calls differ, where no similar ranks tell who is right."""
    if not waiting.mismatches:
        return None
    m = min(waiting.mismatches, key=lambda m: m.seq)
    shapes = sorted(m.members_by_shape, key=lambda shape: len(m.members_by_shape[shape]))
    fewest = len(m.members_by_shape[shapes[0]])
    sides = [ranks for ranks in m.members_by_shape.values() if len(ranks) == fewest]
    culprits = tuple(sorted(rank for ranks in sides for rank in ranks))
    parts = [
        f"{what_ranks(m.members_by_shape[s])} called {s.sentence()} ({_site_of(record, m, s)})"
        for s in reversed(shapes)
    ]
    same_op = len({shape.op for shape in shapes}) == 1
    return _finding(
        waiting,
        Cause.SIZE if same_op else Cause.OTHER_CALL,
        culprits,
        f"call {m.seq} of group {m.group.label()} differs: {', but '.join(parts)}",
        site=_site_of(record, m, shapes[0]),
        stands_at=_stands_at(record, culprits[0]),
    )


def _site_of(record: FlightRecord, mismatch: Mismatch, shape: CallShape) -> str:
    calls = record.ranks[mismatch.members_by_shape[shape][0]]
    index = calls.groups.index(mismatch.group)
    columns = calls.columns
    at = (columns.group_N == index) & (columns.seq_N == mismatch.seq) & (columns.peer_N < 0)
    return record.site(int(columns.site_N[at][0]))


def _of_roots(record: FlightRecord, waiting: Waiting) -> HangFinding | None:
    """Find ranks that others wait for and that wait for no rank themselves."""
    roots = {r for r in waiting.all_awaited if not waiting.awaited.get(r)}
    if not roots:
        return None
    # Ranks without a record come first, because a rank that died blocks the others.
    silent = sorted(roots - record.ranks.keys())
    culprits = tuple(silent or sorted(roots))
    call = _awaited_call(waiting, culprits)
    calls = "they" if len(culprits) > 1 else "it"
    if silent:
        said = (
            f"{what_ranks(culprits)} left no record: {calls} ended, or could not write one, "
            f"before {call.sentence()}"
        )
        return _finding(waiting, Cause.NO_RECORD, culprits, said, site=call.site)
    last = _stands_at(record, culprits[0])
    after = f"after {last}" if last else "before any call"
    said = (
        f"{what_ranks(culprits)} did not come to {call.sentence()}: {calls} left the last call "
        f"{after}, and computes, sleeps or is stuck in code of its own since"
    )
    return _finding(waiting, Cause.BEHIND, culprits, said, site=call.site, stands_at=last)


def _of_circle(record: FlightRecord, waiting: Waiting) -> HangFinding:
    """Find ranks that wait for each other in a circle."""
    circle = _circle(waiting)
    parts = [f"rank {rank} in {waiting.pending[rank][0].sentence()}" for rank in circle[:8]]
    first = waiting.pending[circle[0]][0]
    return _finding(
        waiting,
        Cause.CIRCLE,
        tuple(sorted(circle)),
        "ranks wait for each other in a circle, and none does otherwise than its likes: "
        f"{'; '.join(parts)}",
        site=first.site,
        stands_at=_stands_at(record, circle[0]),
    )


def _circle(waiting: Waiting) -> list[int]:
    """Return ranks of which each waits for the next, and the last for the first."""
    path: list[int] = []
    rank = min(waiting.pending)
    while rank not in path:
        path.append(rank)
        following = sorted(r for r in waiting.awaited.get(rank, ()) if waiting.awaited.get(r))
        if not following:
            return path
        rank = following[0]
    return path[path.index(rank) :]


def _awaited_call(waiting: Waiting, culprits: Iterable[int]) -> PendingCall:
    """Return the earliest awaited call that one of ``culprits`` did not make.

    Of several, it is the one in which most ranks wait. A call is earlier if the ranks that wait in
    it have recorded fewer calls before it.
    """
    wanted = set(culprits)
    counts: Counter[tuple[str, int]] = Counter()
    found: dict[tuple[str, int], PendingCall] = {}
    for rank, calls in waiting.pending.items():
        for call in calls:
            members = {call.peer} if call.shape.is_p2p else set(call.group.ranks)
            if members & wanted and waiting.awaited[rank] & wanted:
                key = (call.group.name, call.seq)
                counts[key] += 1
                found[key] = min(found.get(key, call), call, key=lambda one: one.at)
    return found[min(counts, key=lambda key: (found[key].at, -counts[key]))]


def _finding(
    waiting: Waiting,
    cause: Cause,
    culprits: tuple[int, ...],
    explanation: str,
    *,
    site: str = "",
    stands_at: str = "",
) -> HangFinding:
    by_call: dict[str, list[int]] = {}
    for rank, calls in sorted(waiting.pending.items()):
        if rank not in culprits:
            by_call.setdefault(calls[0].sentence(), []).append(rank)
    ordered = sorted(by_call.items(), key=lambda item: -len(item[1]))
    waits = [f"{who_waits(ranks)} in {sentence}" for sentence, ranks in ordered[:MOST_WAITS]]
    if len(ordered) > MOST_WAITS:
        waits.append(f"… and in {len(ordered) - MOST_WAITS:,} more calls")
    return HangFinding(
        cause=cause,
        culprits=culprits,
        site=site,
        stands_at=stands_at,
        explanation=explanation,
        waits=tuple(waits),
        n_waiting=sum(map(len, by_call.values())),
    )


def _call(record: FlightRecord, token: Token) -> str:
    shape = record.shapes[token.shape]
    name, size, _ = token.role
    return f"{shape.sentence()} in group '{name}' of {size:,}"


def _op(record: FlightRecord, token: Token) -> str:
    return record.shapes[token.shape].op


def _stands_at(record: FlightRecord, rank: int) -> str:
    calls = record.ranks.get(rank)
    if calls is None or not calls.columns.n_calls:
        return ""
    return record.site(int(calls.columns.site_N[-1]))
