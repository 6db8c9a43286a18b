"""One class, several captures: every captured member lends its durations to all.

Two processes of one program differ by per cents on the same machine, and a representative's would
stand for all. Ranks that were captured as witnesses ran the same program, so their steps are
samples of the same durations (PrismLLM, section 4.2, calibrates slices against each other).
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
    """The traces, each representative's with the sampled steps of all that it stands for.

    The steps of its own capture come first, the others' in order of rank.
    """
    pooled = dict(traces)
    members: dict[int, list[RankTrace]] = {}
    for rank in sorted(traces):
        members.setdefault(int(representative_R[rank]), []).append(traces[rank])
    for rank, others in members.items():
        own = traces[rank]
        rows = [own.body_ns_SB]
        rows += [t.body_ns_SB for t in others if t is not own and t.n_body == own.n_body]
        pooled[rank] = replace(own, body_ns_SB=np.concatenate(rows))
    return pooled
