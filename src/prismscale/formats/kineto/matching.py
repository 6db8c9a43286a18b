"""Puts all recorded ranks on one clock and takes the waiting out of their communications.

The n-th communication of a group on one rank meets the n-th on every other member. Clocks of
different machines are aligned by the ends of matched communications, which all members leave at the
same time.

Array axes: ``S`` recorded steps, ``N`` nodes of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import FormatError
from prismscale.formats.kineto.communications import ProfiledCommunication
from prismscale.formats.kineto.rank import CLOCK_JUMP_NS, GAP, RankSteps
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import HOST

GroupKey = tuple[str, tuple[int, ...]]
"""(name, members); members are indices of recorded ranks."""
Place = tuple[int, int]
"""(rank index, node)."""


@dataclass(frozen=True, kw_only=True)
class Matched:
    """All communications among the recorded ranks, with their members."""

    group_of: Mapping[Place, GroupKey]
    """Group of each kernel that communicates among recorded ranks."""
    instances: tuple[tuple[Place, ...], ...]
    """Kernels of each communication: for a collective those of all members in group order, for a
    message those of sender and receiver."""
    peer_of: Mapping[Place, int]
    """Rank index of the other side, for each kernel that sends or receives a message."""

    def relative_peer(self, place: Place) -> int:
        """Return the peer's group rank minus this one's if ``place`` is a message; else -1."""
        if place not in self.peer_of:
            return -1
        members = self.group_of[place][1]
        return members.index(self.peer_of[place]) - members.index(place[0])


def match(ranks: Sequence[RankSteps], global_ranks: Sequence[int]) -> Matched:
    """Match each communication of a rank with those of the other members.

    A message stays computation if its other side was not recorded, or the trace does not name it.

    Args:
        ranks: recorded ranks.
        global_ranks: their ranks in the job; groups are cut to these.

    Raises:
        FormatError: members of a group perform different numbers of communications.
    """
    index_of = {rank: i for i, rank in enumerate(global_ranks)}
    group_of: dict[Place, GroupKey] = {}
    peer_of: dict[Place, int] = {}
    uses: dict[tuple[GroupKey, tuple[int, ...]], dict[int, list[Place]]] = {}
    for i, rank in enumerate(ranks):
        for n, node in enumerate(rank.nodes):
            known = node.communication
            if known is None:
                continue
            key = _group_key(rank, known, i, index_of)
            members = key[1]
            if known.op.is_p2p:
                peer = index_of.get(known.peer)
                if peer is None or peer not in members:
                    continue
                peer_of[i, n] = peer
                members = (i, peer) if known.op is CollectiveOp.SEND else (peer, i)
            group_of[i, n] = key
            uses.setdefault((key, members), {}).setdefault(i, []).append((i, n))
    instances: list[tuple[Place, ...]] = []
    for (_, members), by_rank in uses.items():
        _same_number(ranks, members, by_rank)
        instances += zip(*(by_rank[i] for i in members), strict=True)
    return Matched(group_of=group_of, instances=tuple(instances), peer_of=peer_of)


def _group_key(
    rank: RankSteps, known: ProfiledCommunication, index: int, index_of: Mapping[int, int]
) -> GroupKey:
    """Return the group, cut to recorded ranks; it is all of them where the trace names none."""
    named = tuple(index_of[r] for r in known.ranks if r in index_of)
    members = named if known.ranks else tuple(sorted(index_of.values()))
    if index not in members:
        raise FormatError(
            f"{rank.name}: communicates in the group of ranks {list(known.ranks)}, to which it "
            "does not belong; its rank is taken from distributedInfo, or else from the order in "
            "which traces are given"
        )
    return known.group, members


def _same_number(
    ranks: Sequence[RankSteps], members: Sequence[int], by_rank: Mapping[int, list[Place]]
) -> None:
    counts = {ranks[i].name: len(by_rank.get(i, [])) for i in members}
    if len(set(counts.values())) != 1:
        raise FormatError(
            "members of one group perform different numbers of communications in a step ("
            + ", ".join(f"{name}: {n}" for name, n in counts.items())
            + "); give traces of the same steps, recorded whole"
        )


def clock_offsets(ranks: Sequence[RankSteps], matched: Matched) -> NDArray[np.int64]:
    """Return nanoseconds to subtract from each rank's clock so that communications end together.

    An offset is the median over all matched communications of the rank. A rank without any keeps
    its clock.
    """
    late: list[list[float]] = [[] for _ in ranks]
    for places in matched.instances:
        if len(places) < 2:
            continue
        ends_KS = np.array([ranks[i].end_ns_SN[:, n] for i, n in places])
        for (i, _), late_S in zip(places, ends_KS - np.median(ends_KS, axis=0), strict=True):
            late[i] += late_S.tolist()
    return np.array([round(float(np.median(x))) if x else 0 for x in late], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class OwnTimes:
    """Durations of all nodes without waiting."""

    durations_ns_SN: tuple[NDArray[np.int64], ...]
    """One array per recorded rank."""
    step_ns_S: NDArray[np.int64]
    """Recorded step times: last end minus first start over all ranks."""
    early_ends: int
    """Number of communications that a member left before the last one arrived: taken as 0 long."""


def own_times(ranks: Sequence[RankSteps], matched: Matched) -> OwnTimes:
    """Separate waiting from communication on every rank.

    Raises:
        FormatError: a clock jumps within the recording.
    """
    offsets = clock_offsets(ranks, matched)
    origin_S = np.min([r.origin_ns_S - o for r, o in zip(ranks, offsets, strict=True)], axis=0)
    shift = [(origin_S + o)[:, None] for o in offsets]
    starts = [r.start_ns_SN - s for r, s in zip(ranks, shift, strict=True)]
    ends = [r.end_ns_SN - s for r, s in zip(ranks, shift, strict=True)]
    durations = [e - s for s, e in zip(starts, ends, strict=True)]
    left = [e.copy() for e in ends]
    early_ends = 0
    for places in matched.instances:
        arrival_S = np.max([starts[i][:, n] for i, n in places], axis=0)
        own_S = np.min([ends[i][:, n] for i, n in places], axis=0) - arrival_S
        if own_S.min() < -CLOCK_JUMP_NS:
            i, n = places[0]
            raise FormatError(
                f"{ranks[i].name}: {ranks[i].nodes[n].label} ends on one rank "
                f"{-own_S.min() / 1e6:.1f} ms before it starts on another: the clocks jumped, or "
                "the ranks recorded different steps"
            )
        early_ends += int((own_S < 0).sum())
        for i, n in places:
            durations[i][:, n] = np.maximum(own_S, 0)
            left[i][:, n] = arrival_S + np.maximum(own_S, 0)
    for i, rank in enumerate(ranks):
        meets = {n for r, n in matched.group_of if r == i}
        _follow(rank, meets, ends[i], left[i], durations[i])
    return OwnTimes(
        durations_ns_SN=tuple(durations),
        step_ns_S=np.max([e[:, -1] for e in ends], axis=0),
        early_ends=early_ends,
    )


def _follow(
    rank: RankSteps,
    meets: set[int],
    end: NDArray[np.int64],
    left: NDArray[np.int64],
    durations: NDArray[np.int64],
) -> None:
    """Set the durations of gaps and host nodes so that replay ends them as recorded.

    Each lasts from the latest end of its predecessors in ``left`` to its recorded end. ``left``
    holds the ends in replay; those of nodes outside ``meets`` are filled in here.
    """
    for n, node in enumerate(rank.nodes):
        if n in meets:
            continue
        preds = [p for p in node.preds if p >= 0]
        ready_S = left[:, preds].max(axis=1) if preds else np.zeros(len(left), dtype=np.int64)
        if node.label == GAP or node.lane == HOST:
            durations[:, n] = np.maximum(end[:, n] - ready_S, 0)
        left[:, n] = ready_S + durations[:, n]
