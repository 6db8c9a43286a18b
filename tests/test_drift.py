"""Machine drift: virtual ranks compute at the speed the machine has now."""

from __future__ import annotations

import numpy as np
import pytest

from jobs import pipeline_job
from prismscale.cluster import Cluster
from prismscale.cost.collective import collective_model
from prismscale.cost.durations import GraphDurations
from prismscale.graph.node import NodeKind
from prismscale.live.drift import (
    WINDOW_STEPS,
    DriftingDurations,
    MachineSpeed,
    captured_compute_ns,
)


def test_speed_is_as_captured_before_anything_was_observed() -> None:
    """No observation, no factor."""
    assert MachineSpeed(captured_ns={0: 100.0}).factor == 1.0


def test_speed_is_the_mean_over_live_ranks_of_their_recent_steps() -> None:
    """Rank 0 takes twice its capture's time, rank 3 as long: the machine takes 1.5 times."""
    speed = MachineSpeed(captured_ns={0: 100.0, 3: 500.0})
    speed.observe(0, 200)
    speed.observe(3, 500)
    assert speed.factor == pytest.approx(1.5)


def test_speed_forgets_steps_beyond_its_window() -> None:
    """A slow past does not slow the present."""
    speed = MachineSpeed(captured_ns={0: 100.0})
    for compute_ns in [900] * 5 + [100] * WINDOW_STEPS:
        speed.observe(0, compute_ns)
    assert speed.factor == pytest.approx(1.0)


def test_all_of_a_virtual_rank_drifts() -> None:
    """Communication is the same processor's work as computation."""
    graph = pipeline_job(2, 2, 1, 3)
    durations = GraphDurations(graph=graph, model=collective_model(Cluster.load("h100-sxm")))
    speed = MachineSpeed(captured_ns={0: 100.0})
    drifting = DriftingDurations(durations=durations, speed=speed)
    speed.observe(0, 300)
    for before, after in zip(durations.body(0, 1), drifting.body(0, 1), strict=True):
        assert np.array_equal(np.asarray(after), np.asarray(before) * 3)


def test_captured_computation_leaves_communication_out() -> None:
    """The reference is computation alone."""
    trace = pipeline_job(2, 2, 1, 3).classes[0].trace
    computes = trace.kind_N[trace.n_prologue :] == NodeKind.COMPUTE
    total = trace.body_ns_SB[:, computes].sum(axis=1).mean()
    assert captured_compute_ns(trace) == pytest.approx(total, rel=0.2)
