"""Curves that Perfetto draws beside a rank's slices: microbatches in flight, and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.trace import RankTrace
from prismscale.sim.timeline import RankTimeline

FORWARD, BACKWARD = "forward", "backward"
IN_FLIGHT = "microbatches in flight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One counter of one rank. Axis ``P``: its points."""

    name: str
    unit: str
    time_ns_P: NDArray[np.int64]
    """Times of the points on the timeline, ascending."""
    value_P: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCurve:
    """A counter over one step, to be drawn in every step that is shown.

    ``time_ns_P`` counts from the beginning of the step; points beyond its end are left out.
    """

    name: str
    unit: str
    time_ns_P: NDArray[np.int64]
    value_P: NDArray[np.int64]

    def over(self, starts_ns: list[int]) -> Curve:
        """Return the curve, repeated in each of the steps that begin at ``starts_ns``."""
        times, values = [], []
        for start, stop in zip(starts_ns, [*starts_ns[1:], np.iinfo(np.int64).max], strict=True):
            shown = self.time_ns_P + start < stop
            times.append(self.time_ns_P[shown] + start)
            values.append(self.value_P[shown])
        return Curve(
            name=self.name,
            unit=self.unit,
            time_ns_P=np.concatenate([np.zeros(0, np.int64), *times]),
            value_P=np.concatenate([np.zeros(0, np.int64), *values]),
        )


def step_starts(trace: RankTrace, kept: RankTimeline) -> list[int]:
    """Return when each whole step of ``kept`` begins: at the earliest start of its nodes."""
    steps = _step_offsets(trace, kept)
    return [int(kept.start_ns_N[at : at + trace.n_body].min()) for at in steps]


def _step_offsets(trace: RankTrace, kept: RankTimeline) -> range:
    """Return the row of ``kept`` at which each whole step begins."""
    first = trace.n_prologue - kept.first_position
    return range(max(first, 0), len(kept.start_ns_N) - trace.n_body + 1, max(trace.n_body, 1))


def in_flight(trace: RankTrace, kept: RankTimeline) -> Curve | None:
    """Count, over time, forward passes that have begun and whose backward pass has not ended.

    A pass is a stretch of computation of one label, up to a message to or from another stage or to
    computation of the other label. Computation outside the passes is labelled as forward, too. So
    if there are more forward than backward stretches, only the longest forward ones count, as many
    as there are backward ones. With several model chunks per rank, each chunk's pass counts.

    Returns:
        The curve, or None where passes cannot be matched: a step has no backward passes, or more of
        them than forward passes, for example because the schedule splits them.
    """
    offsets = _step_offsets(trace, kept)
    if not offsets:
        return None
    work_ns_N = (kept.end_ns_N - kept.start_ns_N)[offsets[0] :]
    passes = list(_passes(trace))
    forward = [(begin, end) for begin, end, name in passes if name == FORWARD]
    ends = [(end, -1) for _, end, name in passes if name == BACKWARD]
    forward.sort(key=lambda own: -int(work_ns_N[own[0] : own[1] + 1].sum()))
    changes = sorted([(begin, 1) for begin, _ in forward[: len(ends)]] + ends)
    if not ends or len(changes) != 2 * len(ends):
        return None
    time_ns_P = np.array(
        [
            (kept.start_ns_N if change > 0 else kept.end_ns_N)[offset + node]
            for offset in offsets
            for node, change in changes
        ],
        dtype=np.int64,
    )
    order = np.argsort(time_ns_P, kind="stable")
    value_P = np.cumsum(np.array([change for _, change in changes] * len(offsets))[order])
    if value_P.min() < 0:
        return None
    return Curve(name=IN_FLIGHT, unit="", time_ns_P=time_ns_P[order], value_P=value_P)


def _passes(trace: RankTrace) -> Iterator[tuple[int, int, str]]:
    """Yield first body node, last body node and label of each stretch, in program order."""
    first, last, name = -1, -1, ""
    # Read only once, because each of these properties makes an array of all nodes.
    is_message_N, communicates_N = trace.is_message_N, trace.communicates_N
    for body in range(trace.n_body):
        node = trace.n_prologue + body
        if is_message_N[node]:
            here = ""
        else:
            label = trace.labels[int(trace.label_N[node])].partition(",")[0]
            if communicates_N[node] or label not in (FORWARD, BACKWARD):
                continue
            here = label
        if here != name:
            if name:
                yield first, last, name
            first, name = body, here
        last = body
    if name:
        yield first, last, name
