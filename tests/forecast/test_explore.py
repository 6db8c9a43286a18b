"""Schedules, graphs by rule, and the exploration of layouts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismscale.cost.collective import NullCollectiveModel
from prismscale.errors import FormatError, UsageError
from prismscale.forecast.draws.montecarlo import MonteCarlo
from prismscale.forecast.layouts.explore import candidates, explore
from prismscale.forecast.layouts.explore_job import ExploreJob
from prismscale.forecast.layouts.layout import Layout, PassCosts, build_layout, median_durations
from prismscale.forecast.layouts.schedules import SCHEDULES, Work, in_flight, schedule
from prismscale.graph.verify import verify
from prismscale.sim.timeline import simulate

JOB = """
world_size = 16
layers = 8
global_batch = 32
micro_batch = 1
[costs]
forward_ns = 1e6
input_gradient_ns = 1e6
weight_gradient_ns = 1e6
[bytes]
boundary = 1000
gradients = 1000
state = 1_000_000
activations = 500_000
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    return ExploreJob.load(tmp_path / "job.toml")


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(SCHEDULES),
    stages=st.integers(1, 6),
    rounds=st.integers(1, 4),
    chunks=st.integers(2, 3),
)
def test_every_schedule_runs_and_does_all_work_once(name, stages, rounds, chunks):
    """On every stage each microbatch goes forward and back once, and the graph is legal and
    runs."""
    chunks = chunks if name == "interleaved" else 1
    microbatches = stages * rounds
    for stage in range(stages):
        actions = schedule(
            name, stage=stage, stages=stages, microbatches=microbatches, chunks=chunks
        )
        assert len(set(actions)) == len(actions)
        passes = [a for a in actions if a.work is not Work.WEIGHT]
        assert len(passes) == 2 * microbatches * chunks
    layout = Layout(tp=1, pp=stages, dp=1, microbatches=microbatches, schedule=name, chunks=chunks)
    costs = PassCosts(forward_ns=10, input_gradient_ns=10, weight_gradient_ns=10)
    graph = build_layout(layout, costs)
    verify(graph)
    assert simulate(graph, median_durations(graph, NullCollectiveModel())).step_ns > 0


@pytest.mark.parametrize(
    ("name", "chunks", "bubble"),
    [("gpipe", 1, 3 * 3), ("1f1b", 1, 3 * 3), ("interleaved", 2, 3 * 3 / 2), ("zero-bubble", 1, 3)],
)
def test_bubbles_are_those_of_the_papers(name, chunks, bubble):
    """With unit passes: (p-1)(F+B+W), halved by two chunks, and (p-1)(F+B-W) for ZB-H1."""
    layout = Layout(tp=1, pp=4, dp=1, microbatches=8, schedule=name, chunks=chunks)
    unit = 1000 // chunks
    costs = PassCosts(forward_ns=unit, input_gradient_ns=unit, weight_gradient_ns=unit)
    graph = build_layout(layout, costs)
    step = simulate(graph, median_durations(graph, NullCollectiveModel())).step_ns
    assert step == 1000 * (8 * 3 + bubble)


def test_activations_in_flight():
    """GPipe holds all microbatches, 1F1B as many as stages follow."""
    shape = {"stages": 4, "microbatches": 16}
    assert in_flight(schedule("gpipe", stage=0, **shape)) == 16
    assert [in_flight(schedule("1f1b", stage=s, **shape)) for s in range(4)] == [4, 3, 2, 1]


def test_layouts_are_ranked_by_p95(job):
    """The fastest comes first; fewer bubbles are faster."""
    listed = candidates(
        job, tp=[1], pp=[4], schedules=["gpipe", "interleaved", "zero-bubble"], memory_bytes=2**40
    )
    found = explore(job, listed, NullCollectiveModel(), MonteCarlo(draws=50, steps=1))
    p95 = [c.draws.quantile_ns(0.95) for c in found]
    assert p95 == sorted(p95)
    assert found[-1].layout.schedule == "gpipe"


def test_what_cannot_be_says_why(job):
    """Too little memory, and numbers that do not divide, are marked and not run."""
    listed = candidates(
        job, tp=[1, 3], pp=[2, 16], schedules=["gpipe", "1f1b"], memory_bytes=8_000_000
    )
    why = {c.name: c.why_not for c in listed}
    assert "needs" in why["TP1 PP2 DP8 gpipe"]
    assert "needs" not in why["TP1 PP2 DP8 1f1b"]
    assert "do not divide" in why["TP3 PP2 1f1b"]
    assert "8 layers" in why["TP1 PP16 1f1b"]
    found = explore(job, listed, NullCollectiveModel(), MonteCarlo(draws=5, steps=1))
    assert [c.draws is None for c in found] == sorted(c.draws is None for c in found)


def test_tensor_parallel_layouts_use_the_fused_graph(job):
    """A layout with tensor parallelism is forecast too, and variation makes it slower."""
    listed = candidates(job, tp=[2], pp=[2], schedules=["1f1b"], memory_bytes=2**40)
    found = explore(job, listed, NullCollectiveModel(), MonteCarlo(draws=200, steps=1))
    still = 3e6 * 4 / 2 * (8 + 1)
    assert np.median(found[0].draws.step_ns_D) > still


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"name": "1f2b"}, "did you mean 1f1b"),
        ({"name": "1f1b", "chunks": 2}, "use interleaved"),
        ({"name": "interleaved", "chunks": 1}, "at least 2 chunks"),
        ({"name": "interleaved", "chunks": 2, "microbatches": 6}, "multiples"),
    ],
)
def test_impossible_schedules_are_refused(kwargs, says):
    """What is wrong, and what would do."""
    with pytest.raises(UsageError, match=says):
        schedule(**{"stage": 0, "stages": 4, "microbatches": 8, **kwargs})


def test_a_damaged_job_file_names_the_key(tmp_path):
    """A missing key is named."""
    (tmp_path / "job.toml").write_text(JOB.replace("layers = 8\n", ""))
    with pytest.raises(FormatError, match="layers"):
        ExploreJob.load(tmp_path / "job.toml")
