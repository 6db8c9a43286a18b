"""Forecasts of imports whose lockstep sets cannot be drawn as one."""

from __future__ import annotations

import json

import numpy as np
import pytest

import prismscale as ps
from prismscale.commands.what_if.what_if_command import what_if
from prismscale.durations.samples import StepSamples
from prismscale.durations.samples_io import load_samples, save_samples
from prismscale.errors import GraphError, UsageError
from prismscale.forecast.draws.lockstep import fuse
from prismscale.forecast.draws.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.draws.sampling import fuse_distributions
from prismscale.forecast.model import model_of
from prismscale.forecast.recording import Changes, load_recording, recording_of_import
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import collect_groups
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord
from prismscale.validation.synthetic_job import Layout, Move, PassCosts, build_layout
from support.forecast_jobs import forecast_app, invoke, recorded_run

ONE_SLOW = Changes(slow={0: 2.0})
"""One rank of a tensor-parallel pair."""


@pytest.fixture
def run(tmp_path):
    """Eight recorded steps of pairs that move in lockstep: few enough for fits."""
    meet = (Move(CollectiveOp.ALL_REDUCE, 2**20),) * 3
    costs = PassCosts(
        forward_ns=900_000, backward_ns=1_800_000, forward_moves=meet, backward_moves=meet
    )
    graph = build_layout(Layout(tp=2, pp=2, dp=2, microbatches=4), costs)
    samples = load_samples(recorded_run(graph, tmp_path / "twenty") / "graph")
    save_samples(samples.select(range(8)), tmp_path / "run" / "graph")
    return tmp_path / "run"


def median_ns(model):
    """The median of a few draws."""
    config = model.drawn(MonteCarlo(draws=200))
    return np.median(draw_steps(model.graph, model.source, config, base=model.base).step_ns_D)


def test_one_slow_rank_of_a_set_is_drawn_for_itself(run):
    """The step is that of the whole graph, and the notes say what was done."""
    recording = load_recording(run, changes=ONE_SLOW)
    model = model_of(recording)
    assert model.fused is None
    assert "every rank drawn for itself" in model.notes[-1]
    whole = model_of(recording, fused=False)
    assert median_ns(model) == pytest.approx(median_ns(whole), rel=0.02)
    assert median_ns(model) > 1.3 * median_ns(model_of(load_recording(run)))


def test_groups_beside_each_other_share_draws_with_a_slow_rank_as_without(run):
    """The draws differ by the slow rank alone."""
    fused = model_of(load_recording(run)).fused
    source = model_of(load_recording(run, changes=ONE_SLOW)).source
    for of_sets_G, alone_G in zip(fused.fused_group, source.once_G, strict=True):
        assert of_sets_G.tolist() == alone_G.tolist()


def test_a_set_that_is_slow_as_a_whole_stays_one(run):
    """Equal speeds need no rank for itself."""
    recording = load_recording(run, changes=Changes(slow={0: 2.0, 1: 2.0}))
    assert model_of(recording).fused is not None


def test_a_slow_rank_is_told_by_commands_without_an_option_to_fuse(run):
    """On the command line and in Python."""
    app = forecast_app()
    app.command("what-if")(what_if)
    few = ("--draws", 20, "--executor", "serial")
    invoke(app, "what-if", run, "kernel=forward.* x2", "--slow", "0=2", *few)
    found = json.loads((run / "results.json").read_text())["forecast"]["what_if"]
    assert found["after"]["step_ns"] > found["before"]["step_ns"]
    assert ps.load(run).forecast(slow={0: 2.0}, draws=5).base_ns > 0


def test_laws_of_unequal_ranks_are_not_fused(run):
    """Whoever fuses them is told what to give instead."""
    source = model_of(load_recording(run, changes=ONE_SLOW)).source
    with pytest.raises(UsageError, match="differ in speed; give one speed for each set"):
        fuse_distributions(fuse(source.graph), source)


def test_sets_that_do_not_fit_other_groups_are_drawn_rank_by_rank():
    """Pairs move in lockstep, and a triple takes one and a half of them."""
    groups = [GroupRecord(ranks=tuple(range(6)), name="world", backend="nccl")]
    groups += [GroupRecord(ranks=r, name="tp", backend="nccl") for r in ((0, 1), (2, 3), (4, 5))]
    groups += [GroupRecord(ranks=r, name="dp", backend="nccl") for r in ((0, 1, 2), (3, 4, 5))]
    builder = TraceBuilder(rank=0, world_size=6, groups=[g for g in groups if 0 in g.ranks])
    last = -1
    for computes, group_index in ((True, 1), (True, 1), (False, 2)):
        last = builder.add_compute(1_000, preds=[last]) if computes else last
        last = builder.add_communication(
            CollectiveOp.ALL_REDUCE, 8, group_index=group_index, preds=[last], durations_ns=100
        )
    traces, same = {0: builder.build(known_groups=groups)}, np.zeros(6, dtype=np.int64)
    graph = assemble(traces, same, collect_groups(traces, 6, same))
    with pytest.raises(GraphError, match="several groups"):
        fuse(graph)
    recording = recording_of_import(StepSamples.from_graph(graph), Changes())
    assert model_of(recording).graph is graph
