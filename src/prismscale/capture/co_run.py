"""Times captured ranks again, in slices that really communicate.

A rank that is captured alone shows what it does. How long this takes, on a target whose processors
communicate, shows only beside other ranks: see [Note: slices that communicate] in
:mod:`prismscale.host_comm.cohort_peers`. Steps and groups are known by then, so slices are chosen
by the communications between their ranks.
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
    """Number of ranks that fit the cores."""
    spec: CaptureSpec
    """Settings of the job."""
    traces: dict[int, RankTrace]
    """Traces of ranks that ran alone."""

    def capture_together(self, ranks: Sequence[int], *, marks: int) -> list[RankTrace]:
        """Capture a slice; each rank makes ``marks`` optimizer calls."""
        ...


Slice = tuple[int, ...]
"""Ranks that run and communicate together, ascending."""


def co_runs_to_time(runner: TimesCoRuns) -> list[Slice]:
    """Return the slices that have to be timed, because their ranks take other times than alone.

    There are none where processors do not communicate: there durations do not depend on the ranks
    alongside.
    """
    if runner.spec.device != "cpu" or not runner.spec.communication_load:
        return []
    return co_runs_for(runner.traces, runner.jobs)


def time_co_runs(
    runner: TimesCoRuns, slices: Sequence[Slice], progress: StageUpdate | None = None
) -> None:
    """Replace the durations of each captured rank by those that it has in its slice.

    A rank that is in no slice keeps its own durations. So does a rank whose slice fails, as it may
    where gloo lacks an operation that an emulated backend answers, and a rank that does other work
    in its slice than alone.
    """
    for done, ranks in enumerate(slices):
        if progress is not None:
            progress(done, len(slices))
        known = [runner.traces[r] for r in ranks if r in runner.traces]
        # All ranks run equally long: a rank that stopped early would leave the others waiting.
        marks = max(t.facts.calls for t in known)
        try:
            timed = runner.capture_together(ranks, marks=marks)
        except (ScriptError, StuckError, UsageError):
            # The logs of the slice say why; the result says which communications were measured.
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
    """Return slices of at most ``cores`` ranks each.

    A captured rank is placed with the ranks that it communicates with most often in a step, as far
    as they fit.
    """
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
    """Count the sets of ranks that take part in the rank's communications of a step."""
    found: Counter[frozenset[int]] = Counter()
    for node in trace.communications(trace.n_prologue, trace.n_nodes):
        found[frozenset(trace.participants(node))] += 1
    return found


def _has_body_of(alone: RankTrace, again: RankTrace) -> bool:
    """Return whether the steady step of both traces is the same, node by node."""
    return alone.n_body == again.n_body and all(
        np.array_equal(a, b) for a, b in zip(_body(alone), _body(again), strict=True)
    )


def _body(trace: RankTrace) -> list[Any]:
    steady = slice(trace.n_prologue, None)
    # The bytes of an all_to_all follow the current values, so they are not compared.
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
