"""Finds synchronization that the trace does not show.

Workers that never begin an operation before the last of them has come to it, although they come at
different times, waited for each other in a call that nobody recorded. In the public traces this is
the all-reduce of the loss over the last stage's replicas after the last backward, and its report to
the other stages of replica 0. The wait must not stay in the gaps: it moves with anybody's speed.

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
"""Workers that come closer together than this (median over steps) tell nothing."""
STEADY = 0.1
"""What a waiter needs after the last one's coming varies by less than this part of the spread."""
ALWAYS = 0.95
"""Part of the steps in which nobody may go on before the last one has come."""
CLOCK_NS = 1_000_000
"""Going on this much before the last one comes is clock error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Barrier:
    """A wait of some workers for each other before one of their units."""

    group: Group
    label: str
    """Type of the operation before which they wait."""
    members: tuple[tuple[int, int, int], ...]
    """(stage, data-parallel rank, unit before which it waits)."""
    workers: frozenset[tuple[int, int]]
    """The same without the unit."""
    own_ns_T: NDArray[np.int64]
    """From the last member's coming to the first one's going on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenBarriers:
    """All barriers of a step, in the order in which a worker passes them."""

    barriers: tuple[Barrier, ...]
    left_ns_TDU: tuple[Spans, ...]
    """By stage: when each worker has left each unit and the barriers behind it."""


def hidden_barriers(stages: Sequence[StageUnits], parts: Separated) -> HiddenBarriers:
    """Find them before the first unit of every type of operation."""
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
    """By operation type: the first unit of that type in each stage, as (stage, unit)."""
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
    """Larger sets first: within a set that waits as a whole, no smaller one is told apart."""
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
