"""One run has one step: whoever draws around it finds the step that ``prismscale run`` shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.cluster import Cluster
from prismscale.durations.faults import Faults
from prismscale.durations.recosting import CostSettings
from prismscale.durations.scenario import Scenario
from prismscale.errors import FormatError, UsageError
from prismscale.forecast.draws.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.draws.quotient import quotient_of
from prismscale.forecast.model import NONE, model_of
from prismscale.forecast.recording import Changes, load_recording, recording_of
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.io import load_graph, save_graph
from prismscale.graph.trace import GroupRecord
from prismscale.runfolder import RunFolder
from prismscale.sim.retime import retime
from prismscale.sim.timeline import simulate_steady
from support.jobs import TENSOR, job_from_traces, pipeline_job
from support.strategies import jobs

H100 = "h100-sxm"
H100_NAME = Cluster.load(H100).device.name


def saved_run(root, graph, **scenario):
    """A run folder as ``prismscale run`` leaves it, as far as forecasts read it."""
    folder = RunFolder(root=root)
    save_graph(graph, folder.graph)
    Scenario(cluster=Cluster.load(H100), **scenario).save(folder.scenario)
    return root


def step_of(root):
    """What ``prismscale run`` shows."""
    folder = RunFolder(root=root)
    return retime(Scenario.load(folder.scenario).durations(load_graph(folder.graph))).step_ns


def drawn(recording, **choices):
    """Step times of a few draws."""
    model = model_of(recording, **choices)
    config = MonteCarlo(draws=3, steps=model.steps)
    return model, draw_steps(model.graph, model.source, config, base=model.base).step_ns_D


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_without_variation_every_draw_is_the_runs_step(data: st.DataObject) -> None:
    """On random graphs, lanes, samples, speeds and slow ranks; to the nanosecond."""
    graph = data.draw(jobs()).graph
    world = graph.world_size
    slow = data.draw(
        st.dictionaries(st.integers(0, world - 1), st.sampled_from([0.5, 1.3, 3.0]), max_size=2)
    )
    scale = data.draw(st.sampled_from([1.0, 0.2, 1.7]))
    with TemporaryDirectory() as folder:
        root = saved_run(Path(folder), graph, compute_scale=scale, faults=Faults(slow=slow))
        model, steps_D = drawn(load_recording(root), variability=NONE)
        assert set(steps_D.tolist()) == {step_of(root)} == {model.step_ns}


def test_draws_of_a_job_that_does_not_settle_are_the_runs_step(tmp_path):
    """They are the mean of the very steps whose mean the run shows."""
    builder = TraceBuilder(rank=0, world_size=1, groups=[GroupRecord(ranks=(0,))])
    builder.begin_body()
    builder.add_compute(1100, preds=[-11])
    root = saved_run(tmp_path, job_from_traces({0: builder.build()}))
    model, steps_D = drawn(load_recording(root), variability=NONE)
    assert set(steps_D.tolist()) == {step_of(root)} == {model.step_ns}


@pytest.mark.parametrize("samples", [1, 5])
def test_what_changes_afterwards_is_as_if_it_had_been_run_so(tmp_path, samples):
    """Cluster, speed and slow ranks, given to ``run`` or to the forecast of a plain run."""
    graph = pipeline_job(2, 2, 2, 4, samples=samples)
    cluster = Cluster.load("b200")
    asked = {"compute_scale": 0.3, "slow": {3: 1.4, 5: 2.0}}
    run_so = saved_run(tmp_path / "so", graph, compute_scale=0.3, faults=Faults(slow=asked["slow"]))
    Scenario(cluster=cluster, compute_scale=0.3, faults=Faults(slow=asked["slow"])).save(
        RunFolder(root=run_so).scenario
    )
    plain = saved_run(tmp_path / "plain", graph)
    _, steps_D = drawn(
        load_recording(plain, changes=Changes(cluster="b200", **asked)), variability=NONE
    )
    assert set(steps_D.tolist()) == {step_of(run_so)}
    assert step_of(run_so) != step_of(plain)


def test_a_slow_node_of_a_placement_is_a_slow_rank_of_a_run(tmp_path):
    """The evaluator's factors and ``--slow`` give one step."""
    graph = pipeline_job(2, 2, 1, 4)
    plain = saved_run(tmp_path / "plain", graph)
    model = model_of(load_recording(plain), variability=NONE)
    factor_R = np.array([1.0, 1.0, 1.25, 1.0])
    source, base = model.slowed(factor_R)
    config = MonteCarlo(draws=2)
    steps_D = draw_steps(model.graph, source, config, base=base).step_ns_D
    slowed = saved_run(tmp_path / "slow", graph, faults=Faults(slow={2: 1.25}))
    assert set(steps_D.tolist()) == {step_of(slowed)}


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_ranks_drawn_as_one_change_no_draw(seed):
    """Tensor-parallel ranks that cannot differ: the smaller job has the same step in every draw."""
    recording = with_unsteady_communication(recorded(pipeline_job(2, 3, 4, 2)))
    steps = []
    for fused in (True, False):
        model = model_of(recording, fused=fused)
        config = MonteCarlo(draws=8, seed=seed)
        steps.append(draw_steps(model.graph, model.source, config, base=model.base).step_ns_D)
        assert model.graph.world_size == (6 if fused else 24)
    assert steps[0].tolist() == steps[1].tolist()
    assert len(set(steps[0].tolist())) > 1


def test_ranks_that_differ_are_not_drawn_as_one():
    """A slow rank in a tensor-parallel group, and nothing else changed."""
    recording = recorded(pipeline_job(2, 3, 4, 2))
    factor_R = np.ones(24)
    factor_R[1] = 1.5
    slow = recording.base.slowed(factor_R)
    assert quotient_of(recording.samples, recording.base, 8) is not None
    assert quotient_of(recording.samples, slow, 8) is None


def test_groups_across_nodes_are_not_drawn_as_one():
    """Ranks of one group on several nodes find the network in several states."""
    recording = recorded(pipeline_job(2, 3, 4, 2))
    small = quotient_of(recording.samples, recording.base, 8)
    assert small is not None
    assert small.fused.set_group_index == TENSOR
    assert quotient_of(recording.samples, recording.base, 2) is None


def test_the_smaller_job_has_the_runs_step():
    """Re-timed by itself, without any draw."""
    recording = recorded(pipeline_job(2, 3, 4, 2))
    small = quotient_of(recording.samples, recording.base, 8)
    assert small is not None
    assert simulate_steady(small.graph, small.base.durations)[1].step_ns == recording.base.step_ns


def with_unsteady_communication(recording):
    """As if a model had answered for all communication."""
    nodes = [
        (c.index, b)
        for c in recording.samples.graph.classes
        for b in np.flatnonzero(~c.trace.computes_B).tolist()
    ]
    return replace(recording, modelled=frozenset(nodes))


def recorded(graph):
    """The recording of a graph on H100s."""
    scenario = Scenario(cluster=Cluster.load(H100))
    return recording_of(scenario.durations(graph), scenario)


def test_a_job_that_hangs_is_refused(tmp_path):
    """It has no steps to draw."""
    root = saved_run(tmp_path, pipeline_job(2, 1, 1, 2), faults=Faults(hang={0: 2}))
    with pytest.raises(UsageError, match="hangs"):
        load_recording(root)


def test_other_costs_need_the_log_of_launches(tmp_path):
    """A null run's computation belongs to its GPU; without its launches another needs a run."""
    root = saved_run(tmp_path, pipeline_job(2, 1, 1, 2), kernel_costs=CostSettings())
    assert load_recording(root, H100).base.step_ns == step_of(root)
    with pytest.raises(UsageError, match="run the program again"):
        load_recording(root, "b200")


def test_kernel_times_are_a_null_runs(tmp_path):
    """Where computation was measured there is nothing to be costed."""
    root = saved_run(tmp_path, pipeline_job(2, 1, 1, 2))
    with pytest.raises(UsageError, match="was measured"):
        load_recording(root, changes=Changes(kernels="table.json"))


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "x"}', "null", '{"schema": 1}'])
def test_a_damaged_scenario_is_refused(tmp_path, text):
    """By name, whatever is in it."""
    root = saved_run(tmp_path, pipeline_job(2, 1, 1, 2))
    RunFolder(root=root).scenario.write_text(text)
    with pytest.raises(FormatError, match=r"scenario\.json"):
        load_recording(root)


def test_a_scenario_is_read_as_it_was_written(tmp_path):
    """Cluster, speed, faults and GPU."""
    scenario = Scenario(
        cluster=replace(Cluster.load("b200"), name="ours"),
        compute_scale=0.7,
        faults=Faults(slow={3: 1.5}, hang={1: 4}),
        kernel_costs=CostSettings(kernels="table.json", fused=True),
        captures="captures/abc",
    )
    scenario.save(tmp_path / "scenario.json")
    assert Scenario.load(tmp_path / "scenario.json") == scenario
