"""Finds ranks that deviate from similar ranks, by comparing the calls of all ranks.

The calls of a rank form a word of tokens (which of its groups, which call, which peer). Ranks with
the same program have the same word, as far as they came. Where two words with the same beginning
differ, the continuation of fewer ranks is the deviation. Stages of a pipeline are not similar to
each other: only ranks are compared that communicate in common groups, directly or through others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from prismscale.formats.flight_recorder.rank_calls import (
    CallColumns,
    FlightRecord,
    RankCalls,
    RecordedGroup,
)

GroupRole = tuple[str, int, int]
"""A group's description, its size, and its index among the rank's groups with both equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One call, in a form that is equal on all ranks with the same program."""

    role: GroupRole
    shape: int
    """Index into the record's shapes."""
    peer: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """The point at which some ranks deviate from similar ranks."""

    ranks: tuple[int, ...]
    likes: tuple[int, ...]
    """The similar ranks: equal up to this point, and more in number."""
    at: int
    """Number of calls that both have in common."""
    own: Sequence[Token]
    usual: Sequence[Token]
    own_sites: Sequence[int]
    """Index into the record's sites, for each of :attr:`own`."""
    usual_sites: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Word:
    tokens: tuple[Token, ...]
    sites: tuple[int, ...]
    ranks: list[int]
    stage: int
    """Part of the job that the ranks belong to; see :func:`_stages`."""


def deviations(record: FlightRecord, involved: Iterable[int]) -> list[Deviation]:
    """Return the latest deviations of ranks in ``involved``."""
    words = _words(record)
    asked = set(involved)
    found = [
        d
        for word in words
        if asked & set(word.ranks)
        and (d := _deviation(word, [w for w in words if w.stage == word.stage]))
    ]
    latest = max((d.at for d in found), default=0)
    return [d for d in found if d.at == latest]


def _words(record: FlightRecord) -> list[_Word]:
    begins, stage_of = _common_beginnings(record), _stages(record)
    words: dict[tuple[int, tuple[GroupRole, ...], int], _Word] = {}
    for rank in record.ranks:
        calls = record.ranks[rank]
        roles = group_roles(calls.groups)
        key = id(calls.columns), roles, stage_of[rank]
        word = words.get(key)
        if word is None:
            kept = _kept(calls.columns, roles, begins)
            word = _Word(
                tokens=tuple(_tokens(calls.columns, roles, kept)),
                sites=tuple(calls.columns.site_N[kept].tolist()),
                ranks=[],
                stage=stage_of[rank],
            )
            words[key] = word
        word.ranks.append(rank)
    return list(words.values())


def _stages(record: FlightRecord) -> dict[int, int]:
    """Return the part of the job that each rank belongs to: ranks connected by common groups.

    With a pipeline, a group of all ranks does not count, because all stages meet in it.
    """
    called: dict[int, set[int]] = {}
    is_pipeline = False
    groups: set[RecordedGroup] = set()
    for calls in map(record.ranks.__getitem__, record.ranks):
        columns = calls.columns
        if id(columns) not in called:
            called[id(columns)] = set(columns.group_N[columns.peer_N < 0].tolist())
            is_pipeline = is_pipeline or bool((columns.peer_N >= 0).any())
        groups.update(calls.groups[index] for index in called[id(columns)])
    counted = [g for g in groups if not is_pipeline or len(g.ranks) < record.world_size]
    first = [group.ranks[0] for group in counted for _ in group.ranks]
    members = [rank for group in counted for rank in group.ranks]
    size = record.world_size
    links = coo_array((np.ones(len(first), dtype=np.int8), (first, members)), shape=(size, size))
    _, part_R = connected_components(links, directed=False)
    return {rank: int(part_R[rank]) for rank in record.ranks}


def group_roles(groups: Sequence[RecordedGroup]) -> tuple[GroupRole, ...]:
    """Return the role of each group of a rank."""
    seen: Counter[tuple[str, int]] = Counter()
    roles = []
    for group in groups:
        kind = (group.description, len(group.ranks))
        roles.append((*kind, seen[kind]))
        seen[kind] += 1
    return tuple(roles)


def _common_beginnings(record: FlightRecord) -> dict[tuple[GroupRole, bool], int]:
    """Return, for each kind of call, the first number that is still in the record of every rank."""
    begins: dict[tuple[GroupRole, bool], int] = {}
    seen: set[tuple[int, tuple[GroupRole, ...]]] = set()
    for calls in map(record.ranks.__getitem__, record.ranks):
        roles = group_roles(calls.groups)
        if calls.is_whole or (id(calls.columns), roles) in seen:
            continue
        seen.add((id(calls.columns), roles))
        for key, seq in _first_numbers(calls, roles).items():
            begins[key] = max(begins.get(key, seq), seq)
    return begins


def _first_numbers(
    calls: RankCalls, roles: tuple[GroupRole, ...]
) -> dict[tuple[GroupRole, bool], int]:
    columns, first = calls.columns, {}
    for index, role in enumerate(roles):
        for is_p2p in (False, True):
            own = columns.seq_N[(columns.group_N == index) & ((columns.peer_N >= 0) == is_p2p)]
            if len(own):
                first[role, is_p2p] = int(own[0])
    return first


def _kept(
    columns: CallColumns, roles: tuple[GroupRole, ...], begins: dict[tuple[GroupRole, bool], int]
) -> np.ndarray:
    if not begins:
        return np.arange(columns.n_calls)
    first = [[begins.get((role, is_p2p), 0) for is_p2p in (False, True)] for role in roles]
    table = np.array(first, dtype=np.int64).reshape(len(roles), 2)
    wanted = table[columns.group_N, (columns.peer_N >= 0).astype(np.int64)]
    return np.flatnonzero(columns.seq_N >= wanted)


def _tokens(
    columns: CallColumns, roles: tuple[GroupRole, ...], kept: np.ndarray
) -> Iterable[Token]:
    rows = zip(
        columns.group_N[kept].tolist(),
        columns.shape_N[kept].tolist(),
        columns.peer_N[kept].tolist(),
        strict=True,
    )
    known: dict[tuple[int, int, int], Token] = {}
    for row in rows:
        if row not in known:
            known[row] = Token(role=roles[row[0]], shape=row[1], peer=row[2])
        yield known[row]


def _deviation(word: _Word, words: Sequence[_Word]) -> Deviation | None:
    """Find the latest position after which fewer ranks go on as ``word`` does than otherwise."""
    by_place: dict[int, list[_Word]] = {}
    reach = []
    for other in words:
        common = _common(word.tokens, other.tokens)
        reach.append(common)
        if other is not word and common < min(len(word.tokens), len(other.tokens)):
            by_place.setdefault(common, []).append(other)
    for at in sorted(by_place, reverse=True):
        with_it = sum(len(w.ranks) for w, n in zip(words, reach, strict=True) if n > at)
        usual: dict[Token, list[_Word]] = {}
        for other in by_place[at]:
            usual.setdefault(other.tokens[at], []).append(other)
        most = max(usual.values(), key=lambda them: sum(len(w.ranks) for w in them))
        likes = [r for w in most for r in w.ranks]
        if with_it < len(likes):
            longest = max(most, key=lambda w: len(w.tokens))
            return Deviation(
                ranks=tuple(word.ranks),
                likes=tuple(likes),
                at=at,
                own=word.tokens,
                usual=longest.tokens,
                own_sites=word.sites,
                usual_sites=longest.sites,
            )
    return None


def _common(a: Sequence[Token], b: Sequence[Token]) -> int:
    """Return the length of the common beginning of two words."""
    if a is b:
        return len(a)
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x is not y and x != y:
            return n
    return min(len(a), len(b))
