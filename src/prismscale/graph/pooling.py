"""One class, several captures: every captured member lends its durations to all.

Two processes of one program differ by per cents on the same machine, and a representative's would
stand for all. Ranks that were captured as witnesses ran the same program, so their steps are
samples of the same durations (PrismLLM, section 4.2, calibrates slices against each other).

[Note: own steps] A class whose members were all captured has each one's own steps, and its members
replay these, not one and the same step: ranks that were timed side by side were late in turn, and
the job is as slow as whoever is late. Each goes on with the steps of the next, so that ranks whose
steps belong together stay together. Of members that were not captured it is not known by how much
one is late when another is not; they replay the same step.

Where time is modelled, members differ only by what they hold (a last shard may be smaller), in
every step alike. There the longest duration of each node stands for all: the others wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.trace import RankTrace


def pool_samples(
    traces: Mapping[int, RankTrace], representative_R: NDArray[np.int64]
) -> dict[int, RankTrace]:
    """The traces; each representative's holds the sampled steps of all that it stands for.

    Steps of the representative's own capture come first, then those of the others by rank. The
    trace's facts name the ranks in this order.
    """
    pooled = dict(traces)
    members: dict[int, list[RankTrace]] = {}
    for rank in sorted(traces):
        members.setdefault(int(representative_R[rank]), []).append(traces[rank])
    for rank, others in members.items():
        own = traces[rank]
        used = [own, *(t for t in others if t is not own and _is_as_long(t, own))]
        rows, facts = np.concatenate([t.body_ns_SB for t in used]), own.facts
        if facts.modelled:
            rows = rows.max(axis=0, keepdims=True)
            facts = replace(facts, longest_of=tuple(t.captured_as for t in used))
        # Only with equally many rows of each can it be told whose a row is.
        elif len({t.n_samples for t in used}) == 1:
            facts = replace(facts, pooled=tuple(t.rank for t in used))
        pooled[rank] = replace(own, body_ns_SB=rows, facts=facts)
    return pooled


def _is_as_long(trace: RankTrace, own: RankTrace) -> bool:
    """Whether nodes have the same places, by which logs of launches name them. What comes before
    the steps may differ: see [Note: before the steps] in :mod:`prismscale.graph.likeness`."""
    return (trace.n_prologue, trace.n_body) == (own.n_prologue, own.n_body)


def first_own_step(trace: RankTrace, members_M: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row of ``body_ns_SB`` at which the steps of each member begin ``[M]``. Where not every member
    was captured, one 0 for all. See [Note: own steps]."""
    pooled, members = trace.facts.pooled, members_M.tolist()
    if not set(pooled).issuperset(members):
        return np.zeros(1, dtype=np.int64)
    each = trace.n_samples // len(pooled)
    return np.array([each * pooled.index(rank) for rank in members], dtype=np.int64)
