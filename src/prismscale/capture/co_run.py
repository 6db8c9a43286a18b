"""Captured ranks are timed again, in slices that communicate for real.

What a rank does is found alone; how long it takes on a target whose processors communicate, beside
others: see [Note: slices that communicate] in :mod:`prismscale.host_comm.cohort_peers`. Steps and
groups are known by then, so a slice is chosen for what its ranks say to each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from prismscale.capture.capture_spec import CaptureSpec
from prismscale.errors import ScriptError, StuckError, UsageError
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import RankTrace
from prismscale.progress import StageUpdate


class TimesCoRuns(Protocol):
    """Captures ranks side by side."""

    jobs: int
    """How many fit the cores."""
    spec: CaptureSpec
    """The job."""
    traces: dict[int, RankTrace]
    """Of ranks that ran alone."""

    def capture_together(self, ranks: Sequence[int], *, marks: int) -> list[RankTrace]:
        """Capture a slice."""
        ...


Slice = tuple[int, ...]
"""Ranks that are captured together, ascending."""


def co_runs_to_time(runner: TimesCoRuns) -> list[Slice]:
    """Slices whose ranks take other times than they did alone. There are none where processors do
    not communicate: durations do not depend on company there."""
    if runner.spec.device != "cpu" or not runner.spec.communication_load:
        return []
    return co_runs_for(runner.traces, runner.jobs)


def time_co_runs(
    runner: TimesCoRuns, slices: Sequence[Slice], progress: StageUpdate | None = None
) -> None:
    """Give each captured rank the durations that it shows in its slice. A rank that is in no slice
    keeps its own durations. So does a rank that fails in its slice, as it may where gloo lacks what
    an emulated backend answers, or that does other work there than alone."""
    for done, ranks in enumerate(slices):
        if progress is not None:
            progress(done, len(slices))
        known = [runner.traces[r] for r in ranks if r in runner.traces]
        # All run equally long: whoever stopped early would leave the others waiting.
        marks = max(t.facts.calls for t in known)
        try:
            timed = runner.capture_together(ranks, marks=marks)
        except (ScriptError, StuckError, UsageError):
            # Its logs say why; the result says which communications were measured.
            continue
        for again in timed:
            alone = runner.traces.get(again.rank)
            if alone is not None and _has_body_of(alone, again):
                runner.traces[again.rank] = replace(
                    alone,
                    body_ns_SB=again.body_ns_SB,
                    facts=replace(alone.facts, co_run=again.facts.co_run),
                )


def co_runs_for(traces: Mapping[int, RankTrace], cores: int) -> list[Slice]:
    """Slices of at most ``cores`` ranks each. A captured rank has those beside it with whom it
    communicates most often in a step, as far as they fit."""
    slices: list[Slice] = []
    placed: set[int] = set()
    for rank in sorted(traces):
        if rank in placed:
            continue
        ranks: frozenset[int] = frozenset({rank})
        for partners, _ in _partners(traces[rank]).most_common():
            if len(ranks | partners) <= cores:
                ranks |= partners
        if len(ranks) > 1:
            slices.append(tuple(sorted(ranks)))
            placed |= ranks
    return slices


def _partners(trace: RankTrace) -> Counter[frozenset[int]]:
    """Who takes part in the rank's communications, and how often in a step."""
    found: Counter[frozenset[int]] = Counter()
    for node in trace.communications(trace.n_prologue, trace.n_nodes):
        found[frozenset(trace.participants(node))] += 1
    return found


def _has_body_of(alone: RankTrace, again: RankTrace) -> bool:
    """Whether the steady step is the same, node by node."""
    return alone.n_body == again.n_body and all(
        np.array_equal(a, b) for a, b in zip(_body(alone), _body(again), strict=True)
    )


def _body(trace: RankTrace) -> list[Any]:
    steady = slice(trace.n_prologue, None)
    # What an all_to_all carries follows the values of the moment.
    agreed = [CollectiveOp(op).bytes_must_agree for op in trace.op_N[steady].tolist()]
    edges = [
        trace.pred_distance_P[a:b].tolist()
        for a, b in pairwise(trace.pred_start_N1[trace.n_prologue :].tolist())
    ]
    return [
        trace.kind_N[steady],
        trace.op_N[steady],
        trace.group_index_N[steady],
        trace.peer_N[steady],
        np.where(agreed, trace.bytes_N[steady], 0),
        [len(e) for e in edges],
        [d for e in edges for d in e],
    ]
