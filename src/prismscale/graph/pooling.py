"""Pools the durations of all captured ranks of a class.

Two processes of one program differ by per cents on the same machine, and without pooling the
representative's durations would stand for the whole class. Ranks that were captured as witnesses
ran the same program, so their steps are samples of the same durations (PrismLLM, section 4.2,
calibrates slices against each other).

[Note: own steps] If all members of a class were captured, each member replays its own steps first,
not the same step as the others: ranks that were timed side by side were late in turn, and the job
is as slow as whichever rank is late. After its own steps each member continues with those of the
next captured rank, so that steps which belong together stay together. If some members were not
captured, it is unknown by how much one is late when another is not, so all members replay the same
step.

If time is modelled, members differ only by what they hold (a last shard may be smaller), and in the
same way in every step. Then the longest duration of each node stands for the class, because the
other members wait for the slowest one.
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
    """Return the traces, with the sampled steps of each class pooled in its representative.

    Steps of the representative's own capture come first, then those of the other captured ranks in
    order of rank. The trace's facts name the ranks in this order. If time is modelled, one row
    holds the longest duration of each node instead.
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
        # A row can be assigned to its rank only if all ranks contribute equally many rows.
        elif len({t.n_samples for t in used}) == 1:
            facts = replace(facts, pooled=tuple(t.rank for t in used))
        pooled[rank] = replace(own, body_ns_SB=rows, facts=facts)
    return pooled


def _is_as_long(trace: RankTrace, own: RankTrace) -> bool:
    """Return whether both traces have the same numbers of prologue and body nodes.

    Launch logs name nodes by their position. The nodes before the steps may differ: see
    [Note: before the steps] in :mod:`prismscale.graph.likeness`.
    """
    return (trace.n_prologue, trace.n_body) == (own.n_prologue, own.n_body)


def first_own_step(trace: RankTrace, members_M: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the row of ``body_ns_SB`` at which each member's own steps begin ``[M]``.

    If not every member was captured, the result is one 0 for all. See [Note: own steps]."""
    pooled, members = trace.facts.pooled, members_M.tolist()
    if not set(pooled).issuperset(members):
        return np.zeros(1, dtype=np.int64)
    each = trace.n_samples // len(pooled)
    return np.array([each * pooled.index(rank) for rank in members], dtype=np.int64)
