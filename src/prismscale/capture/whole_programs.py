"""Writes out all steps of captured ranks, to find mistakes that occur in one step only.

A trace is one ordinary step that repeats. A rank's unusual steps are not in it but in a file beside
it. Here the steps are written out one after the other, as far as they were watched, and each rank
that was watched represents itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.capture.capture_spec import unusual_path
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import GroupTable
from prismscale.graph.io import load_traces
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.periodic import (
    Calendar,
    Schedule,
    ordinary_from,
    ordinary_step,
    scheduled,
)
from prismscale.graph.trace import RankTrace


def deviating_step(
    captures: Path, traces: Mapping[int, RankTrace], representative_R: NDArray[np.int64]
) -> int | None:
    """Return the first step in which a captured rank and its representative differ, or None.

    They differ in their communications, though their ordinary steps are the same.

    Raises:
        FormatError: damaged files beside the traces.
    """
    unusual = {rank: _by_number(_unusual(captures, trace)) for rank, trace in traces.items()}
    found = []
    for rank, trace in traces.items():
        other = int(representative_R[rank])
        if trace.facts.equivalent_to is not None or other == rank:
            continue
        seen = min(_watched(traces, rank), _watched(traces, other))
        numbers = (n for n in {*unusual[rank], *unusual[other]} if n <= seen)
        found += [
            n
            for n in numbers
            if _communications(unusual[rank].get(n) or ordinary_step(trace))
            != _communications(unusual[other].get(n) or ordinary_step(traces[other]))
        ]
    return min(found, default=None)


def _communications(step: RankTrace) -> bytes:
    """Encode the communications of a step in program order; equal for equal calls."""
    nodes = np.flatnonzero(step.communicates_N)
    columns = (step.op_N, step.group_index_N, step.peer_N, step.bytes_N)
    return b"|".join(np.ascontiguousarray(column[nodes]).tobytes() for column in columns)


def _by_number(steps: Sequence[RankTrace]) -> dict[int, RankTrace]:
    return {s.facts.step.number: s for s in steps if s.facts.step is not None}


def whole_programs(
    captures: Path,
    traces: Mapping[int, RankTrace],
    representative_R: NDArray[np.int64],
    groups: GroupTable,
) -> JobGraph:
    """Return the graph of all ranks with every watched step written out in its prologue.

    Args:
        captures: folder of the captured ranks' files.
        traces: by captured rank.
        representative_R: for every rank the captured rank whose trace it runs.
        groups: the groups of every rank.

    Raises:
        FormatError: damaged files beside the traces.
    """
    unusual = {rank: _unusual(captures, trace) for rank, trace in traces.items()}
    of_R = representative_R.copy()
    watched = [r for r, t in traces.items() if t.facts.equivalent_to is None]
    of_R[watched] = watched
    used = sorted(set(of_R.tolist()))
    until = 1 + min(_watched(traces, rank) for rank in used)
    programs = {rank: _written_out(traces[rank], unusual[rank], until) for rank in used}
    return assemble(programs, of_R, groups)


def _unusual(captures: Path, trace: RankTrace) -> Sequence[RankTrace]:
    path = unusual_path(captures, trace.captured_as)
    return load_traces(path) if path.exists() else ()


def _watched(traces: Mapping[int, RankTrace], rank: int) -> int:
    """Return the number of watched steps of a rank, or of the rank that it was found equal to."""
    trace = traces[rank]
    return traces.get(trace.captured_as, trace).facts.watched_steps


def _written_out(trace: RankTrace, unusual: Sequence[RankTrace], until: int) -> RankTrace:
    steps = _by_number(unusual)
    calendar = Calendar(schedules=tuple(Schedule(numbers=(n,), every=0) for n in steps))
    if until <= ordinary_from(trace):
        return trace
    whole = scheduled(trace, list(steps.values()), calendar, until)
    calls = (until - 1) * trace.facts.calls_per_step
    return replace(whole, facts=replace(whole.facts, calls_in_prologue=calls))
