"""What a job does only now and then: every tenth step, every hundredth.

Logging, evaluation, a checkpoint. A captured rank that was seen doing something else than its
ordinary step leaves that *unusual step*, as the body of a trace without a prologue. Ranks differ in
when they differ (only the first may print); so the steps of all ranks are laid beside each other,
and a rank that did nothing unusual in a step takes its ordinary one. What comes out is a
:class:`PeriodicEvent`. A graph in which it is followed by an ordinary step is re-timed like any
graph; what it takes beyond two ordinary steps is the event's cost.

[Note: places] Steps of several kinds follow one another in an order that may never have been seen.
An edge across the border between two steps is therefore kept by its place on its lane: the last
node of a stream, the second last communication of a group. What an ordinary step finds there in the
step before it, whichever that is, it comes after.

[Note: schedule] An event that was seen several times comes as often as its distances allow. One
that was seen once is assumed to come as often as it took to come the first time, because a program
counts from its beginning. Logging and evaluation in one step are an event of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd, lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import FormatError
from prismscale.graph.facts import CaptureFacts
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import NODE_COLUMNS, RankTrace

RARE = 20_000
"""Steps over which it is counted how often events come, and fall together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """When an event comes; see [Note: schedule]."""

    numbers: tuple[int, ...]
    """The steps in which it was seen, from 1, ascending."""
    every: int
    """Steps from one to the next; 0: it came once, and did not come again when it would have."""

    @property
    def first(self) -> int:
        """The step in which it was first seen."""
        return self.numbers[0]

    def comes_in(self, number: int) -> bool:
        """Whether step ``number`` is one of its."""
        if number < self.first or not self.every:
            return number == self.first
        return (number - self.first) % self.every == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Calendar:
    """Which event comes in which step.

    Where several would come at once, what then happens was seen if they came together in a step
    that was: it is that step's event. Otherwise it is the rarest of them, and nobody knows.
    """

    schedules: tuple[Schedule, ...]

    def event_in(self, number: int) -> int | None:
        """Place of the event in :attr:`schedules`; None for an ordinary step."""
        coming = self._coming(number)
        if not coming:
            return None
        # What came once comes in no other step: nothing is rarer.
        rarest = max(coming, key=lambda n: self.schedules[n].every or RARE)
        return self._seen_together().get(coming, rarest)

    def is_known(self, number: int) -> bool:
        """Whether what comes in a step was seen, alone or so together."""
        coming = self._coming(number)
        return len(coming) < 2 or coming in self._seen_together()

    def rates(self) -> list[float]:
        """How often each event comes, per step of a long training."""
        if not self.schedules:
            return []
        # After the first of each, what comes repeats every lowest common multiple of steps.
        first = max(s.first for s in self.schedules) + 1
        steps = min(lcm(*(s.every or 1 for s in self.schedules)), RARE)
        counts = Counter(self.event_in(number) for number in range(first, first + steps))
        return [counts[n] / steps for n in range(len(self.schedules))]

    def _coming(self, number: int) -> frozenset[int]:
        return frozenset(n for n, s in enumerate(self.schedules) if s.comes_in(number))

    def _seen_together(self) -> dict[frozenset[int], int]:
        return {
            self._coming(number): n
            for n, schedule in enumerate(self.schedules)
            for number in schedule.numbers
        }


@dataclass(frozen=True, kw_only=True)
class PeriodicEvent:
    """What the whole job does in some of its steps."""

    schedule: Schedule
    traces: Mapping[int, RankTrace]
    """By captured rank: this step as the body of a trace without a prologue."""


def periodic_events(
    traces: Mapping[int, RankTrace], found: Mapping[int, Sequence[RankTrace]]
) -> list[PeriodicEvent]:
    """What a job does now and then, in the order in which it was first seen.

    Args:
        traces: by captured rank, its ordinary program.
        found: by captured rank, its unusual steps.
    """
    by_number: dict[int, dict[int, RankTrace]] = {}
    work_of: dict[int, list[tuple[int, str]]] = {}
    # In order of rank: steps in which all do the same then have equal keys.
    for rank in sorted(found):
        for step in found[rank]:
            facts = step.facts.step
            if facts is None:
                raise FormatError(f"rank {rank}: an unusual step does not say which step it was")
            by_number.setdefault(facts.number, {})[rank] = step
            work_of.setdefault(facts.number, []).append((rank, facts.work))
    same_work: dict[tuple[tuple[int, str], ...], list[int]] = {}
    for number in sorted(by_number):
        same_work.setdefault(tuple(work_of[number]), []).append(number)
    watched = min((t.facts.watched_steps for t in traces.values()), default=0)
    settled = max((ordinary_from(t) for t in traces.values()), default=0)
    events = []
    for numbers in same_work.values():
        schedule = schedule_of(numbers, watched, by_number.keys())
        if not schedule.every and schedule.first <= settled:
            # The program was still warming up.
            continue
        steps = by_number[numbers[0]]
        of_ranks = {rank: steps.get(rank, ordinary_step(t)) for rank, t in traces.items()}
        events.append(PeriodicEvent(schedule=schedule, traces=of_ranks))
    return events


def schedule_of(numbers: Sequence[int], watched: int, unusual: Iterable[int]) -> Schedule:
    """When an event comes that was seen in the steps ``numbers``.

    Args:
        numbers: ascending, at least one.
        watched: steps that were seen.
        unusual: those of them in which anything unusual was: where two events come at once, neither
            is seen by itself.
    """
    first = numbers[0]
    if len(numbers) > 1:
        # See [Note: schedule].
        every = gcd(*(b - a for a, b in pairwise(numbers)))
        return Schedule(numbers=tuple(numbers), every=every)
    # What follows the optimizer of step n lies in step n + 1.
    every = first - 1
    missed = first + every <= watched and first + every not in set(unusual)
    return Schedule(numbers=(first,), every=0 if missed or every < 1 else every)


def with_ordinary_step(event: RankTrace, trace: RankTrace) -> RankTrace:
    """A rank's step of an event and an ordinary one, as one body."""
    both = concatenated([event, ordinary_step(trace)], ordinary_step(trace))
    # How durations were obtained is the same as in the ordinary step.
    facts = CaptureFacts(device=trace.facts.device, has_own_share=trace.facts.has_own_share)
    return replace(both, facts=facts)


def scheduled(
    trace: RankTrace, events: Sequence[RankTrace], calendar: Calendar, until: int
) -> RankTrace:
    """A rank's program with the steps before number ``until`` written out in its prologue, periodic
    events among them; from then on the ordinary step repeats.

    Args:
        trace: the rank's ordinary program.
        events: the rank's step of each event.
        calendar: when each comes.
        until: number of a step.
    """
    parts: list[RankTrace] = []
    for k, number in enumerate(range(ordinary_from(trace), until)):
        at = calendar.event_in(number)
        if at is not None:
            parts.append(events[at])
            continue
        row = trace.body_ns_SB[k % trace.n_samples][np.newaxis]
        parts.append(part_of(trace, trace.n_prologue, trace.n_nodes, row))
    return _before_body(trace, parts) if parts else trace


def ordinary_from(trace: RankTrace) -> int:
    """Number of the step that is a trace's first body."""
    return trace.facts.calls_in_prologue // trace.facts.calls_per_step + 1


def ordinary_step(trace: RankTrace) -> RankTrace:
    """The body of a trace, without its prologue, as measured in its first sample."""
    return part_of(trace, trace.n_prologue, trace.n_nodes, trace.body_ns_SB[:1])


def part_of(trace: RankTrace, start: int, stop: int, body_ns_SB: NDArray[np.int64]) -> RankTrace:
    """Nodes ``[start, stop)`` as a body without a prologue."""
    rows = slice(start, stop)
    first, last = trace.pred_start_N1[start], trace.pred_start_N1[stop]
    return replace(
        trace,
        n_prologue=0,
        **trace.columns_of(rows),
        pred_start_N1=trace.pred_start_N1[start : stop + 1] - first,
        pred_distance_P=trace.pred_distance_P[first:last],
        prologue_ns=np.zeros(0, dtype=np.int64),
        body_ns_SB=body_ns_SB,
        memory=None,
        facts=CaptureFacts(),
    )


def concatenated(parts: Sequence[RankTrace], ordinary: RankTrace) -> RankTrace:
    """Bodies without prologues, one after the other, as one body; see [Note: places].

    Names of lanes, labels and sites are those of the longest list of the rank, of which the others
    are beginnings.

    Args:
        parts: each with edges across its beginning as if ``ordinary`` came before it.
        ordinary: the ordinary step; also what comes before the first part.
    """
    lane_N = np.concatenate([p.lane_N for p in parts])
    places = _Places(lane_N=lane_N, ordinary=ordinary)
    counts, distances, start = [], [], 0
    for part in parts:
        kept_counts, kept = places.of_part(part, start)
        counts.append(kept_counts)
        distances.append(kept)
        start += part.n_nodes
    starts = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    return replace(
        parts[0],
        **_joined(parts),
        pred_start_N1=starts.astype(np.int32),
        pred_distance_P=np.concatenate(distances).astype(np.int32),
        body_ns_SB=np.concatenate([p.body_ns_SB[:1] for p in parts], axis=1),
        lanes=max((p.lanes for p in parts), key=len),
        labels=max((p.labels for p in parts), key=len),
        sites=max((p.sites for p in parts), key=len),
        facts=CaptureFacts(),
    )


def _joined(parts: Sequence[RankTrace]) -> dict[str, Any]:
    """What describes each node, of one part after the other."""
    return {name: np.concatenate([getattr(p, name) for p in parts]) for name in NODE_COLUMNS}


@dataclass(kw_only=True)
class _Places:
    """Finds nodes by their place on their lane, counted back from a border between two steps."""

    lane_N: NDArray[np.int16]
    """Of all parts."""
    ordinary: RankTrace

    def of_part(self, part: RankTrace, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Number of predecessors of each node of a part that begins at ``start``, and distances."""
        counts = np.diff(part.pred_start_N1).astype(np.int64)
        distances = part.pred_distance_P.astype(np.int64)
        nodes = np.repeat(np.arange(part.n_nodes), counts)
        # Edges that leave the part at its beginning.
        for entry in np.flatnonzero(distances > nodes).tolist():
            node = int(nodes[entry])
            distances[entry] = node + self._back(start, int(distances[entry]) - node)
        return counts, distances

    def _back(self, start: int, back: int) -> int:
        """An edge leads to the node that is ``back`` nodes before the end of an ordinary step.
        Returns how many nodes before ``start`` the node lies that has its place here."""
        ordinary = self.ordinary.lane_N
        # See [Note: places]. First, which place on its lane that is, counted back from the border.
        whole, rest = divmod(back - 1, len(ordinary))
        lane = ordinary[len(ordinary) - 1 - rest]
        place = whole * int((ordinary == lane).sum()) + int((ordinary[-1 - rest :] == lane).sum())
        before = np.flatnonzero(self.lane_N[:start] == lane)
        if place <= len(before):
            return start - int(before[-place])
        # Beyond the first part there are ordinary steps without end.
        place -= len(before)
        own = np.flatnonzero(ordinary == lane)
        steps, left = divmod(place - 1, len(own))
        return start + steps * len(ordinary) + len(ordinary) - int(own[-1 - left])


def _before_body(trace: RankTrace, parts: Sequence[RankTrace]) -> RankTrace:
    """The same trace with ``parts`` between its prologue and its body."""
    n, ordinary = trace.n_prologue, ordinary_step(trace)
    whole = concatenated([*parts, ordinary], ordinary)
    longer = whole.n_nodes - trace.n_body
    starts = np.cumsum([n, *(p.n_nodes for p in parts)])[:-1]
    prologue = part_of(trace, 0, n, trace.prologue_ns[np.newaxis])
    return RankTrace(
        rank=trace.rank,
        world_size=trace.world_size,
        groups=trace.groups,
        known_groups=trace.known_groups,
        n_prologue=n + longer,
        **_joined([prologue, whole]),
        pred_start_N1=np.concatenate(
            [prologue.pred_start_N1, whole.pred_start_N1[1:] + prologue.pred_start_N1[-1]]
        ),
        pred_distance_P=np.concatenate([prologue.pred_distance_P, whole.pred_distance_P]),
        prologue_ns=np.concatenate([trace.prologue_ns, whole.body_ns_SB[0, :longer]]),
        body_ns_SB=trace.body_ns_SB,
        lanes=whole.lanes,
        labels=whole.labels,
        sites=whole.sites,
        memory=trace.memory,
        facts=replace(trace.facts, step_starts=tuple(starts.tolist())),
    )


def further_site(event: PeriodicEvent, traces: Mapping[int, RankTrace]) -> str:
    """The line of the program from which an event communicates and no ordinary step does; empty
    where it does not communicate otherwise."""
    for rank in sorted(event.traces):
        own, ordinary = event.traces[rank], ordinary_step(traces[rank])
        known = {ordinary.site(i) for i in ordinary.communications(0, ordinary.n_nodes)}
        for node in np.flatnonzero(own.kind_N != NodeKind.COMPUTE).tolist():
            if own.site(node) not in known:
                return own.site(node)
    return ""
