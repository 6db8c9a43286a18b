"""Pooling: captured members of a class lend each other their sampled steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prismscale.cluster import Cluster
from prismscale.cost.collective import collective_model
from prismscale.durations.graph_durations import GraphDurations
from prismscale.graph.pooling import first_own_step, pool_samples
from prismscale.sim.timeline import simulate
from support.jobs import job_from_traces
from support.traces import joined_traces, small_trace

MODEL = collective_model(Cluster.load("loopback-gloo"))


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


def test_members_that_were_captured_replay_their_own_steps() -> None:
    """Late in turn, they make every step as long as the longer one; so do those that follow."""
    traces = joined_traces([10, 30], [30, 10])
    graph = job_from_traces(pool_samples(traces, np.array([0, 0])), {0: 0, 1: 0})
    durations = GraphDurations(graph=graph, model=MODEL, sampled=True)

    assert [c.size for c in graph.classes] == [2]
    assert simulate(graph, durations, steps=5).job_step_ns_TD[:, 0].tolist() == [35] * 5


def test_members_that_were_not_captured_share_their_steps() -> None:
    """Nothing is known of when one is late and another is not."""
    pooled = pool_samples(joined_traces([10, 30], [30, 10]), np.array([0, 0]))[0]
    assert first_own_step(pooled, np.array([1])).tolist() == [2]
    assert first_own_step(pooled, np.array([0, 1, 2])).tolist() == [0]


def test_steps_of_unlike_number_are_nobodys_own() -> None:
    """Where one rank's begin could not be told."""
    pooled = pool_samples(joined_traces([10, 30], [30]), np.array([0, 0]))[0]
    assert pooled.n_samples == 3
    assert first_own_step(pooled, np.array([0, 1])).tolist() == [0]


def test_where_time_is_modelled_the_longest_of_a_class_stands_for_all() -> None:
    """A last shard is smaller, in every step alike: that is no variation from step to step."""
    traces = {
        rank: replace(trace, facts=replace(trace.facts, modelled=True))
        for rank, trace in joined_traces([10], [30]).items()
    }
    pooled = pool_samples(traces, np.array([0, 0]))[0]
    longest = np.maximum(traces[0].body_ns_SB, traces[1].body_ns_SB)
    assert np.array_equal(pooled.body_ns_SB, longest)
    assert first_own_step(pooled, np.array([0, 1])).tolist() == [0]
