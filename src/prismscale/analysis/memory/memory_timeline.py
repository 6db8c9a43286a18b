"""The memory of one step over time, by kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.analysis.memory.memory_kinds import KINDS, kinds_of
from prismscale.analysis.memory.memory_log import Action, MemoryLog

MOST_POINTS = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTimeline:
    """Allocated bytes by kind, at chosen events (``T``) of the step that contains the peak.

    Of each range of events, the one with most allocated bytes is chosen, so the peak is among them.
    """

    step: int
    """Counted from 1."""
    time_ns_T: NDArray[np.int64]
    """Time of the issuing host, from the beginning of the step."""
    bytes_KT: NDArray[np.int64]
    """Bytes by kind (``K``, in the order of :data:`KINDS`)."""
    reserved_bytes_T: NDArray[np.int64]


def memory_timeline(log: MemoryLog, most: int = MOST_POINTS) -> MemoryTimeline:
    """Make the timeline of the step that contains the peak, with at most ``most`` points."""
    step = log.step_of(log.peak) if log.n_events else 0
    bounds = [*log.step_starts, log.n_events]
    first, stop = bounds[step], max(bounds[step + 1], bounds[step] + 1) if log.n_events else 0
    chosen = _chosen(log.allocated_bytes_E[first:stop], most) + first
    return MemoryTimeline(
        step=step + 1,
        time_ns_T=log.time_ns_E[chosen] - (log.time_ns_E[first] if stop else 0),
        bytes_KT=_bytes_by_kind(log)[:, chosen],
        reserved_bytes_T=log.reserved_bytes_E[chosen],
    )


def _chosen(allocated_E: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return the event with most allocated bytes in each of ``most`` equal parts."""
    parts = np.array_split(np.arange(len(allocated_E)), min(most, max(1, len(allocated_E))))
    found = [int(part[np.argmax(allocated_E[part])]) for part in parts if len(part)]
    return np.array(found, dtype=np.int64)


def _bytes_by_kind(log: MemoryLog) -> NDArray[np.int64]:
    (made,) = np.nonzero(log.action_E == Action.ALLOC)
    change_KE = np.zeros((len(KINDS), log.n_events + 1), dtype=np.int64)
    kind = kinds_of(log, made)
    np.add.at(change_KE, (kind, made), log.block_bytes_E[made])
    np.add.at(change_KE, (kind, log.freed_E[made]), -log.block_bytes_E[made])
    return np.cumsum(change_KE[:, :-1], axis=1)
