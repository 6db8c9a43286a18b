"""Ranks that do what a captured one did: known for it after one steady step.

The prologue of a trace ends with a steady step: the body is the step that was found equal to it.
A rank that has done, node by node, what is in another's prologue has therefore been compared
through a whole steady step. Where time is modelled, that is all there is to learn from it: its
durations are the same by the same model, so far and from then on. Where time is measured, every
captured rank lends its own durations to its class, and nobody follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from prismscale.capture.node_stream import NodeStream
from prismscale.devices.protocol import CaptureDevice
from prismscale.graph.io import load_trace
from prismscale.graph.trace import (
    PROGRAM_COLUMNS,
    GroupRecord,
    MemoryRecord,
    RankTrace,
    TraceColumns,
)

_COLUMNS = (*PROGRAM_COLUMNS, "prologue_ns")


class Witness:
    """Compares a rank with those whose traces are in a folder, also while they appear there."""

    def __init__(self, folder: Path, device: CaptureDevice) -> None:
        self._folder = folder
        self._device = device
        self._traces: dict[Path, RankTrace] = {}

    def recognise(self, stream: NodeStream, groups: Sequence[GroupRecord]) -> RankTrace | None:
        """The rank whose prologue is exactly what was recorded until this mark, if there is one."""
        alike = [t for t in self._others() if t.n_prologue == len(stream.nodes)]
        if not alike:
            return None
        # Modelled durations can be read already: see [Note: when a node is final].
        so_far = stream.columns_so_far(self._device)
        sizes = [len(g.ranks) for g in groups]
        return next((trace for trace in alike if begins_as(trace, so_far, sizes)), None)

    def _others(self) -> list[RankTrace]:
        for path in sorted(self._folder.glob("rank-*.parquet")):
            if path not in self._traces:
                self._traces[path] = load_trace(path)
        return list(self._traces.values())


def begins_as(trace: RankTrace, so_far: TraceColumns, group_sizes: Sequence[int]) -> bool:
    """Whether ``so_far``, all of it prologue, is the prologue of ``trace``: kinds, operations,
    lanes, bytes, peers, edges, group sizes (by group index) and durations."""
    n = so_far.n_nodes
    n_preds = int(so_far.pred_start_N1[-1])
    return (
        trace.n_prologue == n
        and [len(g.ranks) for g in trace.groups] == list(group_sizes)
        and trace.lanes[: len(so_far.lanes)] == so_far.lanes
        and all(np.array_equal(getattr(trace, c)[:n], getattr(so_far, c)) for c in _COLUMNS)
        and np.array_equal(trace.pred_start_N1[: n + 1], so_far.pred_start_N1)
        and np.array_equal(trace.pred_distance_P[:n_preds], so_far.pred_distance_P)
    )


def in_place_of(
    trace: RankTrace,
    rank: int,
    groups: Sequence[GroupRecord],
    known_groups: Sequence[GroupRecord],
    memory: MemoryRecord | None,
) -> RankTrace:
    """``trace`` as that of ``rank``, which did the same: groups and memory are its own."""
    return replace(
        trace,
        rank=rank,
        groups=tuple(groups),
        known_groups=tuple(known_groups),
        memory=memory,
        # One that was itself found equal left no log of what it launched.
        facts=replace(trace.facts, equivalent_to=trace.captured_as),
    )
