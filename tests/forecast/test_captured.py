"""Layouts of a captured run: its stages laid out anew."""

from dataclasses import replace

import numpy as np
import pytest

from prismscale.cost.collective import NullCollectiveModel
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.samples import StepSamples
from prismscale.errors import UsageError
from prismscale.forecast.draws.montecarlo import MonteCarlo
from prismscale.forecast.draws.variation import Variation
from prismscale.forecast.layouts.captured import CapturedJob, relaid_difference
from prismscale.forecast.layouts.explore import candidates, explore
from prismscale.forecast.layouts.layout import (
    Layout,
    Move,
    PassCosts,
    build_layout,
    median_durations,
)
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import MemoryRecord
from prismscale.sim.retime import retime
from prismscale.sim.timeline import simulate
from support.forecast_jobs import forecast_app, invoke, recorded_run, small_graph

PP, MICROBATCHES = 4, 8
STATE, ACTIVATIONS, EMBEDDING = 1000, 100, 70
REDUCE = CollectiveOp.ALL_REDUCE


def chunk_costs(place):
    """The further down the pipeline, the longer."""
    return PassCosts(
        forward_ns=10**6 + 10**5 * place,
        input_gradient_ns=10**6 + 10**5 * place,
        weight_gradient_ns=10**6 + 10**5 * place,
        optimizer_ns=10**5,
        forward_moves=(Move(REDUCE, 4096),) * 2,
        backward_moves=(Move(REDUCE, 4096),) * 2,
        boundary_bytes=512,
        step_moves=(Move(REDUCE, 8192, "dp"),),
    )


def captured(*, memory=False, **kwargs):
    """A run whose graph was made by rule, read as if it had been captured."""
    layout = Layout(**{"tp": 2, "pp": PP, "dp": 2, "microbatches": MICROBATCHES, **kwargs})
    costs = [chunk_costs(p % PP) for p in range(PP * layout.chunks)]
    graph = build_layout(layout, costs)
    if memory:
        graph = replace(graph, classes=tuple(with_peak(c, i) for i, c in enumerate(graph.classes)))
    return CapturedJob.of(StepSamples.from_graph(graph), Variation()), graph


def with_peak(rank_class, stage):
    peak = STATE + (PP - stage) * ACTIVATIONS + EMBEDDING * (stage == 0)
    record = MemoryRecord(peak_bytes=peak, peak_step=0)
    return replace(rank_class, trace=replace(rank_class.trace, memory=record))


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_a_layout_laid_out_anew_is_itself(name, chunks):
    """Degrees, microbatches and schedule are read off the graph, and the step takes as long."""
    job, graph = captured(schedule=name, chunks=chunks)
    assert job.captured_layout.name == graph.meta["layout"]
    own_ns = retime(GraphDurations(graph=graph, model=NullCollectiveModel())).step_ns
    assert relaid_difference(job, own_ns, NullCollectiveModel()) == pytest.approx(0, abs=1e-6)


def test_another_schedule_takes_what_the_rules_say():
    """GPipe captured, interleaved forecast: the step of that schedule with the same costs."""
    job, _ = captured(schedule="gpipe")
    layout = job.layout(tp=2, pp=PP, chunks=2, name="interleaved")
    halves = [
        replace(c, forward_ns=c.forward_ns // 2, forward_moves=(), backward_moves=())
        for c in job.pass_costs(job.captured_layout)
    ]
    assert [c.optimizer_ns for c in job.pass_costs(layout)] == [10**5] * 8
    total = sum(c.forward_ns for c in job.pass_costs(layout))
    assert total == pytest.approx(2 * sum(c.forward_ns for c in halves), rel=1e-6)


def test_other_degrees_share_out_the_same_work():
    """Half the stages: twice the work each, and half the microbatches for twice the replicas."""
    job, _ = captured()
    layout = job.layout(tp=2, pp=2, chunks=1, name="1f1b")
    assert (layout.dp, layout.microbatches) == (4, 4)
    first, second = job.pass_costs(layout)
    assert first.forward_ns == 2 * 10**6 + 10**5
    assert second.forward_ns == 2 * 10**6 + 5 * 10**5
    assert len(first.forward_moves) == 4
    wider = job.layout(tp=4, pp=PP, chunks=1, name="1f1b")
    assert job.pass_costs(wider)[0].forward_ns == 10**6 // 2


def test_memory_is_told_apart_into_state_and_activations():
    """Peaks of 1F1B's stages say what a schedule that holds more would need."""
    job, _ = captured(memory=True)
    peak = {
        name: job.peak_bytes(job.layout(tp=2, pp=PP, chunks=1, name=name))
        for name in ("1f1b", "gpipe")
    }
    assert peak["1f1b"] == STATE + PP * ACTIVATIONS + EMBEDDING
    assert peak["gpipe"] == STATE + MICROBATCHES * ACTIVATIONS + EMBEDDING


def test_what_does_not_fit_is_marked():
    """Too little memory for GPipe, enough for 1F1B."""
    job, _ = captured(memory=True)
    room = STATE + PP * ACTIVATIONS + EMBEDDING
    listed = candidates(job, tp=[2], pp=[PP], schedules=["gpipe", "1f1b"], memory_bytes=room)
    found = explore(job, listed, NullCollectiveModel(), MonteCarlo(draws=5, steps=1))
    assert [c.why_not[:5] for c in found] == ["", "needs"]


def test_variation_of_passes_is_the_recorded_one(tmp_path):
    """5 % noise on every span is 5 % on the spans of other layouts."""
    from prismscale.forecast.recording import load_recording

    run = recorded_run(small_graph(), tmp_path / "run")
    job = CapturedJob.of(load_recording(run, "h100-sxm").samples, Variation())
    assert job.variation.compute_cv == pytest.approx(0.05, rel=0.3)
    assert job.variation.communication_cv == Variation().communication_cv


def test_a_run_without_pipeline_is_refused():
    """What its stages would pass on is not known."""
    graph = build_layout(Layout(tp=1, pp=1, dp=2, microbatches=2), chunk_costs(0))
    with pytest.raises(UsageError, match="no pipeline"):
        CapturedJob.of(StepSamples.from_graph(graph), Variation())


def test_tensor_parallelism_is_not_invented():
    """Captured without it, its collectives are not known; ranks must divide."""
    job, _ = captured(tp=1)
    with pytest.raises(UsageError, match="collectives are not known"):
        job.layout(tp=2, pp=2, chunks=1, name="1f1b")
    with pytest.raises(UsageError, match="do not divide"):
        job.layout(tp=1, pp=3, chunks=1, name="1f1b")


def test_explore_takes_a_run(tmp_path):
    """The run's own degrees are the default; figures go into its results and its report."""
    run = recorded_run(small_graph(), tmp_path / "run")
    arguments = ("--schedule", "1f1b,gpipe,zero-bubble", "--draws", 20, "--executor", "serial")
    text = invoke(forecast_app(), "explore", run, "--cluster", "h100-sxm", *arguments)
    assert "captured as TP1 PP2 DP2 1f1b, 2 microbatches" in " ".join(text.split())
    assert "forecast-layouts" in (run / "report.html").read_text()


def test_relaid_steps_are_those_of_the_captured_graph():
    """Not only the same on average: the same simulated step."""
    job, graph = captured()
    again = build_layout(job.captured_layout, job.pass_costs(job.captured_layout))
    steps = [
        simulate(g, median_durations(g, NullCollectiveModel()), steps=2).step_ns
        for g in (graph, again)
    ]
    assert np.ptp(steps) <= PP * MICROBATCHES
