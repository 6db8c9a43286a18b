"""Finds synchronization that the trace does not show.

Some workers reach an operation at different times, yet none of them ever begins it before the last
one has reached it. They waited for each other in a call that the trace does not record. In the
public traces this is the all-reduce of the loss over the last stage's replicas after the last
backward, and its report to the other stages of replica 0. The wait must not stay in the gaps,
because it changes with the speed of each of these workers.

Array axes: ``T`` steps, ``D`` data-parallel ranks, ``W`` workers of one candidate group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.formats.straggler.separate import Separated, Spans
from prismscale.formats.straggler.structure import RECEIVES, SENDS, Group, StageUnits

SMALLEST_SPREAD_NS = 1_000_000
"""Workers whose arrivals spread less than this (median over steps) tell nothing."""
STEADY = 0.1
"""A worker's time from the last arrival to its own begin must vary by less than this part of the
spread of arrivals (median absolute deviation over steps)."""
ALWAYS = 0.95
"""Smallest part of the steps in which no worker goes on before the last one has arrived."""
CLOCK_NS = 1_000_000
"""Going on less than this before the last arrival counts as clock error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Barrier:
    """A point at which some workers wait for each other, before one unit of each."""

    group: Group
    label: str
    """Type of the operation before which they wait."""
    members: tuple[tuple[int, int, int], ...]
    """(stage, data-parallel rank, unit before which it waits) of each worker."""
    workers: frozenset[tuple[int, int]]
    """(stage, data-parallel rank) of each worker."""
    own_ns_T: NDArray[np.int64]
    """Time from the last worker's arrival until the first one goes on; at least 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenBarriers:
    """All barriers of a step, in the order in which a worker passes them."""

    barriers: tuple[Barrier, ...]
    left_ns_TDU: tuple[Spans, ...]
    """By stage: when each worker has left each unit and the barriers after it."""


def hidden_barriers(stages: Sequence[StageUnits], parts: Separated) -> HiddenBarriers:
    """Find the barriers before the first unit of every type of operation."""
    left = [x.copy() for x in parts.left_ns_TDU]
    found = []
    for label, units in _boundaries(stages).items():
        for group, members in _candidates(units, left[0].shape[1], len(stages)):
            begin_TW = np.stack([parts.begin_ns_TDU[s][:, d, u] for s, d, u in members], axis=1)
            came_TW = np.stack([left[s][:, d, u - 1] for s, d, u in members], axis=1)
            if not _waits(begin_TW, came_TW):
                continue
            last_T = came_TW.max(axis=1)
            own_T = np.maximum(begin_TW.min(axis=1) - last_T, 0)
            for s, d, u in members:
                left[s][:, d, u - 1] = last_T + own_T
            workers = frozenset((s, d) for s, d, _ in members)
            found.append(
                Barrier(group=group, label=label, members=members, workers=workers, own_ns_T=own_T)
            )
    return HiddenBarriers(barriers=tuple(found), left_ns_TDU=tuple(left))


def _boundaries(stages: Sequence[StageUnits]) -> dict[str, list[tuple[int, int]]]:
    """Return, by operation type, the first unit of that type in each stage, as (stage, unit)."""
    found: dict[str, dict[int, int]] = {}
    for stage in stages:
        for u, members in enumerate(stage.units):
            label = stage.keys[members[0]].label
            if u > 0 and label not in SENDS and label not in RECEIVES:
                found.setdefault(label, {}).setdefault(stage.stage, u)
    return {label: sorted(units.items()) for label, units in found.items()}


def _candidates(
    units: list[tuple[int, int]], n_replicas: int, n_stages: int
) -> Iterator[tuple[Group, tuple[tuple[int, int, int], ...]]]:
    """Yield sets of workers that may wait for each other, larger sets first.

    Within a set that waits as a whole, no smaller set can be told apart.
    """
    replicas = range(n_replicas)
    whole = len(units) == n_stages
    if whole and n_replicas > 1 and n_stages > 1:
        yield Group.WORLD, tuple((s, d, u) for s, u in units for d in replicas)
    if n_replicas > 1:
        for s, u in units:
            yield Group.DATA, tuple((s, d, u) for d in replicas)
    if whole and n_stages > 1:
        for d in replicas:
            yield Group.PIPELINE, tuple((s, d, u) for s, u in units)


def _waits(begin_TW: NDArray[np.int64], came_TW: NDArray[np.int64]) -> bool:
    spread = float(np.median(came_TW.max(axis=1) - came_TW.min(axis=1)))
    if spread < SMALLEST_SPREAD_NS:
        return False
    after_TW = begin_TW - came_TW.max(axis=1, keepdims=True)
    held_T = (after_TW > -CLOCK_NS).all(axis=1)
    unsteady_W = np.median(np.abs(after_TW - np.median(after_TW, axis=0)), axis=0)
    return bool(held_T.mean() >= ALWAYS and unsteady_W.max() < STEADY * spread)
