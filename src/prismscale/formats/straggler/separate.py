"""Separates waiting from communication.

A recorded communication contains the time its worker waited for the others; re-timing with it would
count waiting twice. A communication's own time starts when the last member arrives and ends when
the first one leaves. If a member stays longer, the rest goes into the gap before its next unit.
Gaps are times that no operation covers (data loading, launches); they are kept.

Array axes: ``T`` steps, ``D`` data-parallel ranks, ``U`` units of one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.formats.straggler.structure import StageUnits, TracedCollective
from prismscale.formats.straggler.table import Repairs

CLOCK_JUMP_NS = 10_000_000
"""Disorder up to this is rounding; beyond it a worker's clock jumped, and the step is left out."""

Spans = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Separated:
    """The times of a trace without waiting."""

    begin_ns_TDU: tuple[Spans, ...]
    """By stage: when each unit begins (arrives, for a communication)."""
    left_ns_TDU: tuple[Spans, ...]
    """By stage: when each unit would end if its communications lasted only their own time."""
    closed_ns_TDU: tuple[Spans, ...]
    """By stage: when each unit really ended, but never before the unit ahead of it."""
    own_ns: tuple[Spans, ...]
    """By collective: its own time, ``[T, 1]`` across replicas, ``[T, D]`` else."""
    disordered_T: NDArray[np.bool_]
    """Steps with a clock jump."""


def separate(
    stages: Sequence[StageUnits],
    meets: Sequence[TracedCollective],
    origin_ns_T: NDArray[np.int64],
    repairs: Repairs,
) -> Separated:
    """Find the own time of every communication, and when units begin and end without waiting.

    Args:
        stages: units of every stage.
        meets: communications between them.
        origin_ns_T: start of each step, from which times are counted.
        repairs: counts the times that were corrected.
    """
    disordered_T = np.zeros(len(origin_ns_T), dtype=bool)
    begins, ends = [], []
    for stage in stages:
        begin, end = _one_after_another(stage, origin_ns_T, disordered_T, repairs)
        begins.append(begin)
        ends.append(end)
    # Computation ends as recorded. The ends of units that communicate are filled in below.
    left = [end.copy() for end in ends]
    for stage in stages:
        for u in _communicating(stage, meets):
            left[stage.stage][..., u] = 0
    own_ns = []
    for collective in meets:
        places = [(s, stages[s].unit_of(k)) for s, k in collective.members]
        arrival = np.max([begins[s][..., u] for s, u in places], axis=0)
        first_end = np.min([ends[s][..., u] for s, u in places], axis=0)
        if collective.group.across_replicas:
            arrival = arrival.max(axis=1, keepdims=True)
            first_end = first_end.min(axis=1, keepdims=True)
        early = arrival - first_end
        disordered_T |= (early > CLOCK_JUMP_NS).any(axis=1)
        repairs.early_ends += int((early > 0).sum())
        own = np.maximum(-early, 0)
        own_ns.append(own)
        for s, u in places:
            left[s][..., u] = np.maximum(left[s][..., u], arrival + own)
    return Separated(
        begin_ns_TDU=tuple(begins),
        left_ns_TDU=tuple(left),
        closed_ns_TDU=tuple(ends),
        own_ns=tuple(own_ns),
        disordered_T=disordered_T,
    )


def _communicating(stage: StageUnits, meets: Sequence[TracedCollective]) -> set[int]:
    return {stage.unit_of(k) for m in meets for s, k in m.members if s == stage.stage}


def _one_after_another(
    stage: StageUnits,
    origin_ns_T: NDArray[np.int64],
    disordered_T: NDArray[np.bool_],
    repairs: Repairs,
) -> tuple[Spans, Spans]:
    """Return begin and end of every unit, with no begin before the end of the unit ahead of it."""
    origin = origin_ns_T[:, None, None]
    start, end = stage.start_ns_TDU - origin, stage.end_ns_TDU - origin
    closed = np.maximum.accumulate(end, axis=-1)
    before = np.concatenate([np.zeros_like(closed[..., :1]), closed[..., :-1]], axis=-1)
    # An operation inside another (a garbage collection inside a receive) overlaps by its length.
    overlap = np.minimum(before - start, end - start)
    repairs.trimmed += int((overlap > 0).sum())
    repairs.trimmed_most_ns = max(repairs.trimmed_most_ns, int(overlap.max()))
    disordered_T |= (overlap > CLOCK_JUMP_NS).any(axis=(1, 2))
    return np.maximum(start, before), closed
