"""Periodic events: what a job does only in some steps, such as logging or a checkpoint.

If a captured rank was seen to do something else than its ordinary step (logging, evaluation, a
checkpoint; every tenth step, every hundredth), that *unusual step* is stored as the body of a trace
without a prologue. Ranks need not differ from their ordinary step in the same steps (perhaps only
the first rank prints). So the steps of all ranks are put side by side, and a rank that did nothing
unusual in a step takes its ordinary one. The result is a :class:`PeriodicEvent`. A graph of the
event followed by an ordinary step is re-timed like any graph. The time beyond two ordinary steps is
the cost of the event.

[Note: places] Steps of several kinds may follow one another in an order that was never seen. The
source of an edge across the border between two steps is therefore identified by its place on its
lane, counted back from the border: the last node of a stream, the second last communication of a
group. The edge then leads from whatever node has this place in the step before, of whichever kind
that step is.

[Note: schedule] The period of an event that was seen several times is the greatest common divisor
of the distances between its steps. An event that was seen once is assumed to have a period as long
as the time until it first came, because a program counts from its beginning. Logging and evaluation
in the same step are an event of their own.
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
"""Most steps over which the rates of events, and of their coincidences, are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The steps in which an event comes; see [Note: schedule]."""

    numbers: tuple[int, ...]
    """The steps in which it was seen, from 1, ascending."""
    every: int
    """Period in steps; 0 if it came only once and did not come again when it was due."""

    @property
    def first(self) -> int:
        """The step in which it was first seen."""
        return self.numbers[0]

    def comes_in(self, number: int) -> bool:
        """Return whether the event comes in step ``number``."""
        if number < self.first or not self.every:
            return number == self.first
        return (number - self.first) % self.every == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Calendar:
    """Maps steps to events.

    Several events may be due in one step. If the same events were due together in a step that was
    seen, the event of that step is taken. Otherwise the rarest of them is taken, and what really
    happens is unknown.
    """

    schedules: tuple[Schedule, ...]

    def event_in(self, number: int) -> int | None:
        """Return the index in :attr:`schedules` of a step's event, or None for an ordinary step."""
        coming = self._coming(number)
        if not coming:
            return None
        # An event with period 0 comes in no other step, so nothing is rarer.
        rarest = max(coming, key=lambda n: self.schedules[n].every or RARE)
        return self._seen_together().get(coming, rarest)

    def is_known(self, number: int) -> bool:
        """Return whether the events due in a step were seen: a single one, or this combination."""
        coming = self._coming(number)
        return len(coming) < 2 or coming in self._seen_together()

    def rates(self) -> list[float]:
        """Return how often each event comes per step of a long training."""
        if not self.schedules:
            return []
        # Once each event has come, steps repeat after the lowest common multiple of the periods.
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
    """An unusual step of the whole job, and when it comes."""

    schedule: Schedule
    traces: Mapping[int, RankTrace]
    """By captured rank, this step as the body of a trace without a prologue."""


def periodic_events(
    traces: Mapping[int, RankTrace], found: Mapping[int, Sequence[RankTrace]]
) -> list[PeriodicEvent]:
    """Return the periodic events of a job, in the order in which they were first seen.

    Args:
        traces: by captured rank, its ordinary program.
        found: by captured rank, its unusual steps.
    """
    by_number: dict[int, dict[int, RankTrace]] = {}
    work_of: dict[int, list[tuple[int, str]]] = {}
    # In order of rank, so that steps in which all ranks do the same have equal keys.
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
    """Return the schedule of an event that was seen in the steps ``numbers``.

    Args:
        numbers: ascending; at least one.
        watched: number of steps that were watched.
        unusual: the watched steps in which anything unusual happened. If two events come in the
            same step, neither is seen by itself.
    """
    first = numbers[0]
    if len(numbers) > 1:
        # See [Note: schedule].
        every = gcd(*(b - a for a, b in pairwise(numbers)))
        return Schedule(numbers=tuple(numbers), every=every)
    # Work after the optimizer of step n lies in step n + 1: the event came after first - 1 steps.
    every = first - 1
    missed = first + every <= watched and first + every not in set(unusual)
    return Schedule(numbers=(first,), every=0 if missed or every < 1 else every)


def with_ordinary_step(event: RankTrace, trace: RankTrace) -> RankTrace:
    """Join a rank's step of an event and its ordinary step into one body."""
    both = concatenated([event, ordinary_step(trace)], ordinary_step(trace))
    # Durations were obtained in the same way as those of the ordinary step.
    facts = CaptureFacts(device=trace.facts.device, has_own_share=trace.facts.has_own_share)
    return replace(both, facts=facts)


def scheduled(
    trace: RankTrace, events: Sequence[RankTrace], calendar: Calendar, until: int
) -> RankTrace:
    """Return a rank's program with the steps before number ``until`` written out in its prologue.

    Periodic events are among these steps. From step ``until`` on the ordinary step repeats.

    Args:
        trace: the rank's ordinary program.
        events: the rank's step of each event, in the order of the calendar's schedules.
        calendar: when each event comes.
        until: number of the first step that is not written out.
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
    """Return the number of the step that is a trace's first body."""
    return trace.facts.calls_in_prologue // trace.facts.calls_per_step + 1


def ordinary_step(trace: RankTrace) -> RankTrace:
    """Return the body of a trace without its prologue, with the durations of its first sample."""
    return part_of(trace, trace.n_prologue, trace.n_nodes, trace.body_ns_SB[:1])


def part_of(trace: RankTrace, start: int, stop: int, body_ns_SB: NDArray[np.int64]) -> RankTrace:
    """Return nodes ``[start, stop)`` as the body of a trace without a prologue."""
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
    """Join bodies without prologues into one body; see [Note: places].

    The lanes, labels and sites are the longest lists among the parts; the other lists are prefixes
    of them.

    Args:
        parts: bodies of one rank. Edges across the beginning of a part are stored as if
            ``ordinary`` came before it.
        ordinary: the ordinary step, which also comes before the first part.
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
    """Concatenate the :data:`NODE_COLUMNS` of all parts."""
    return {name: np.concatenate([getattr(p, name) for p in parts]) for name in NODE_COLUMNS}


@dataclass(kw_only=True)
class _Places:
    """Finds nodes by their place on their lane, counted back from a border between two steps."""

    lane_N: NDArray[np.int16]
    """Lanes of the nodes of all parts."""
    ordinary: RankTrace

    def of_part(self, part: RankTrace, start: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the predecessor counts and distances of a part that begins at node ``start``."""
        counts = np.diff(part.pred_start_N1).astype(np.int64)
        distances = part.pred_distance_P.astype(np.int64)
        nodes = np.repeat(np.arange(part.n_nodes), counts)
        # Only edges that leave the part at its beginning change.
        for entry in np.flatnonzero(distances > nodes).tolist():
            node = int(nodes[entry])
            distances[entry] = node + self._back(start, int(distances[entry]) - node)
        return counts, distances

    def _back(self, start: int, back: int) -> int:
        """Return how many nodes before ``start`` the source of an edge lies.

        In a stream of ordinary steps the source is ``back`` nodes before the border. Here it is the
        node with the same place on its lane.
        """
        ordinary = self.ordinary.lane_N
        # See [Note: places]. The place of the source on its lane, counted back from the border.
        whole, rest = divmod(back - 1, len(ordinary))
        lane = ordinary[len(ordinary) - 1 - rest]
        place = whole * int((ordinary == lane).sum()) + int((ordinary[-1 - rest :] == lane).sum())
        before = np.flatnonzero(self.lane_N[:start] == lane)
        if place <= len(before):
            return start - int(before[-place])
        # Before the first part there are ordinary steps without end.
        place -= len(before)
        own = np.flatnonzero(ordinary == lane)
        steps, left = divmod(place - 1, len(own))
        return start + steps * len(ordinary) + len(ordinary) - int(own[-1 - left])


def _before_body(trace: RankTrace, parts: Sequence[RankTrace]) -> RankTrace:
    """Return the same trace with ``parts`` between its prologue and its body."""
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
    """Return the first call site from which an event communicates but no ordinary step does.

    The string is empty if there is no such call site.
    """
    for rank in sorted(event.traces):
        own, ordinary = event.traces[rank], ordinary_step(traces[rank])
        known = {ordinary.site(i) for i in ordinary.communications(0, ordinary.n_nodes)}
        for node in np.flatnonzero(own.kind_N != NodeKind.COMPUTE).tolist():
            if own.site(node) not in known:
                return own.site(node)
    return ""
