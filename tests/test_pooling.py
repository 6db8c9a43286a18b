"""Pooling: captured members of a class lend each other their sampled steps."""

from __future__ import annotations

import numpy as np

from prismscale.graph.pooling import pool_samples
from test_trace import small_trace


def test_a_representative_gets_the_steps_of_its_witnesses() -> None:
    """Its own first, then the others' in order of rank."""
    traces = {rank: small_trace() for rank in (0, 2, 3)}
    pooled = pool_samples(traces, np.array([0, 0, 0, 0]))

    own = small_trace().body_ns_SB
    assert np.array_equal(pooled[0].body_ns_SB, np.concatenate([own, own, own]))


def test_ranks_of_other_classes_keep_their_own() -> None:
    """Rank 3 stands for itself."""
    traces = {rank: small_trace() for rank in (0, 3)}
    pooled = pool_samples(traces, np.array([0, 0, 0, 3]))

    assert pooled[3].n_samples == small_trace().n_samples
