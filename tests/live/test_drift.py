"""Machine drift: virtual ranks compute at the speed the machine has now."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prismscale.cluster import Cluster
from prismscale.cost.collective import collective_model
from prismscale.durations.faults import Faults
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.source import NEVER
from prismscale.graph.facts import CaptureFacts, CoRunFacts
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import NodeKind
from prismscale.live.coordinator.drift import (
    MOST_MOVING,
    MOVED_BYTES_PER_NS,
    WINDOW_STEPS,
    DriftingDurations,
    MachineSpeed,
    captured_compute_ns,
    communication_slope,
)
from support.jobs import pipeline_job


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


def _drifting(graph: JobGraph) -> tuple[GraphDurations, DriftingDurations]:
    durations = GraphDurations(graph=graph, model=collective_model(Cluster.load("loopback-gloo")))
    speed = MachineSpeed(captured_ns={0: 100.0})
    speed.observe(0, 300)
    return durations, DriftingDurations(durations=durations, speed=speed)


def test_computation_of_virtual_ranks_drifts() -> None:
    """Three times as slow, each takes three times as long."""
    graph = pipeline_job(2, 2, 1, 3)
    durations, drifting = _drifting(graph)
    trace = graph.classes[0].trace
    for node, (before, after) in enumerate(
        zip(durations.body(0, 1), drifting.body(0, 1), strict=True), trace.n_prologue
    ):
        if trace.kind_N[node] == NodeKind.COMPUTE:
            assert np.array_equal(np.asarray(after), np.asarray(before) * 3)


def test_bytes_move_at_their_own_pace() -> None:
    """A communication drifts but for what its bytes take, at most two fifths of it."""
    graph = pipeline_job(2, 2, 1, 3)
    durations, drifting = _drifting(graph)
    trace = graph.classes[0].trace
    for node in trace.communications(trace.n_prologue, trace.n_nodes):
        before = float(np.max(durations.body(0, 1)[node - trace.n_prologue]))
        after = float(np.max(drifting.body(0, 1)[node - trace.n_prologue]))
        moving = min(trace.bytes_N[node] / MOVED_BYTES_PER_NS, MOST_MOVING * before)
        assert after == pytest.approx(moving + 3 * (before - moving), abs=1)


def in_slices(graph: JobGraph, power: float) -> JobGraph:
    """The job with steps of different speed, whose communications follow it by a power."""
    speeds_S = np.linspace(1.0, 2.0, 5)
    classes = []
    for c in graph.classes:
        computes = c.trace.computes_B
        slower = np.where(computes, speeds_S[:, None], speeds_S[:, None] ** power)
        rows = np.rint(1_000_000 * slower).astype(np.int64)
        facts = CaptureFacts(co_run=CoRunFacts(issue_ns=30, common_jitter=0.0, ranks=()))
        classes.append(replace(c, trace=replace(c.trace, body_ns_SB=rows, facts=facts)))
    return replace(graph, classes=tuple(classes))


def test_communications_of_slices_follow_as_far_as_captured_steps_show() -> None:
    """By the power that they do; never against the speed, nor beyond it."""
    job = pipeline_job(2, 2, 1, 3)
    assert communication_slope(in_slices(job, 0.25)) == pytest.approx(0.25, abs=0.01)
    assert communication_slope(in_slices(job, -1.0)) == 0
    assert communication_slope(in_slices(job, 3.0)) == 1
    assert communication_slope(job) is None


def test_durations_of_slices_drift_by_that_power() -> None:
    """Three times as slow: computation takes three times as long, communication less."""
    graph = in_slices(pipeline_job(2, 2, 1, 3), 0.5)
    durations, drifting = _drifting(graph)
    trace = graph.classes[0].trace
    for node, (before, after) in enumerate(
        zip(durations.body(0, 1), drifting.body(0, 1), strict=True), trace.n_prologue
    ):
        factor = 3 if trace.kind_N[node] == NodeKind.COMPUTE else 3**0.5
        assert np.max(after) == pytest.approx(factor * np.max(before), rel=0.01)


def test_what_never_ends_does_not_drift() -> None:
    """A hung rank hangs at any speed."""
    graph = pipeline_job(2, 2, 1, 3)
    model = collective_model(Cluster.load("loopback-gloo"))
    durations = GraphDurations(graph=graph, model=model, faults=Faults(hang={0: 0}))
    speed = MachineSpeed(captured_ns={0: 100.0})
    speed.observe(0, 300)
    drifting = DriftingDurations(durations=durations, speed=speed)
    hung = int(graph.class_of_R[0])
    member = int(graph.member_of_R[0])
    assert np.broadcast_to(drifting.body(hung, 0)[0], graph.classes[hung].size)[member] >= NEVER


def test_captured_computation_leaves_communication_out() -> None:
    """The reference is computation alone."""
    trace = pipeline_job(2, 2, 1, 3).classes[0].trace
    computes = trace.computes_B
    total = trace.body_ns_SB[:, computes].sum(axis=1).mean()
    assert captured_compute_ns(trace) == pytest.approx(total, rel=0.2)
