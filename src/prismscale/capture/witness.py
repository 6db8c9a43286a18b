"""Recognises a rank that runs the same program as a captured rank, after one steady step.

The prologue of a trace ends with a steady step: the body is the step that was found equal to it.
A rank whose nodes so far equal another rank's prologue, node by node, has therefore been compared
through a whole steady step. Where time is modelled, nothing more can be learned from the rank: by
the same model its durations are the same, so far and from then on. Where time is measured, every
captured rank contributes its own durations to its class, and no rank ends early.
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
    """Compares a rank with all traces in a folder, including those that appear there later."""

    def __init__(self, folder: Path, device: CaptureDevice) -> None:
        self._folder = folder
        self._device = device
        self._traces: dict[Path, RankTrace] = {}

    def recognise(self, stream: NodeStream, groups: Sequence[GroupRecord]) -> RankTrace | None:
        """Return the trace whose prologue equals everything recorded up to this mark, or None."""
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
    """Return whether ``so_far``, all of it prologue, equals the prologue of ``trace``.

    Compares kinds, operations, lanes, bytes, peers, edges, group sizes (by group index) and
    durations.
    """
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
    """Return ``trace`` as the trace of ``rank``, which did the same, with its groups and memory."""
    return replace(
        trace,
        rank=rank,
        groups=tuple(groups),
        known_groups=tuple(known_groups),
        memory=memory,
        # A trace's own rank may have been found equal, too; it left no log of its launches.
        facts=replace(trace.facts, equivalent_to=trace.captured_as),
    )
