"""Draws around modelled durations, by a variability profile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prismscale.cluster import Cluster
from prismscale.cost.variability import (
    KernelVariation,
    LinkVariation,
    RegimeVariation,
    StallVariation,
    VariabilityProfile,
)
from prismscale.durations.composition import Composition
from prismscale.durations.scenario import Scenario
from prismscale.errors import UsageError
from prismscale.forecast.draws.montecarlo import Chunk, MonteCarlo, chunks_of, draw_steps
from prismscale.forecast.model import model_of
from prismscale.forecast.modelled.device_speeds import greatest, largest_of_equal, slowness
from prismscale.forecast.modelled.link_factors import crossing, largest
from prismscale.forecast.modelled.modelled_job import Modelled
from prismscale.forecast.modelled.node_stalls import StepStalls
from prismscale.forecast.modelled.profile_draws import SOURCES
from prismscale.forecast.recording import recording_of
from prismscale.forecast.run_spread import RunSpread, variation_shares
from prismscale.forecast.sensitivity import ablate, factors_of
from support.jobs import pipeline_job

ALL = VariabilityProfile(
    name="ours",
    kernels={"gemm": KernelVariation(temporal_cv=0.02, spatial_cv=0.03)},
    links={
        "nvlink": LinkVariation(temporal_cv=0.02),
        "rail": LinkVariation(
            temporal_cv=0.05, pair_cv=0.05, tail_probability=0.01, tail_factor=5.0
        ),
    },
    stalls=StallVariation(per_node_hour=36_000, mean_s=1e-4),
    regimes=RegimeVariation(cv_of_one_second=1e-4, drift_cv=0.002, day_amplitude=0.01),
)


def of_gemms(graph, kernels=1):
    """As if every computation were so many equal matrix products."""
    found = []
    for rank_class in graph.classes:
        share = rank_class.trace.computes_B.astype(np.float64)[:, np.newaxis]
        found.append(Composition(kinds=("gemm",), share_BK=share, square_BK=share / kernels))
    return tuple(found)


def null_run(graph, profile=ALL, devices_per_node=8, kernels=1):
    """A recording as that of a run on the null device."""
    scenario = Scenario(cluster=Cluster.load("h100-sxm"))
    modelled = Modelled(
        profile=profile,
        compositions=of_gemms(graph, kernels),
        devices_per_node=devices_per_node,
    )
    found = recording_of(scenario.durations(graph), scenario)
    return replace(found, modelled_job=modelled)


def drawn(recording, draws=400, seed=0, **choices):
    model = model_of(recording, **choices)
    config = model.drawn(MonteCarlo(draws=draws, seed=seed))
    return model, draw_steps(model.graph, model.source, config, base=model.base)


def without(profile, **parts):
    return replace(profile, **parts)


def test_a_profile_that_varies_nothing_gives_the_runs_step():
    """To the nanosecond but for float32: one part in 16 million."""
    recording = null_run(pipeline_job(2, 3, 4, 4), VariabilityProfile(name="still"))
    model, found = drawn(recording, draws=16)
    np.testing.assert_allclose(found.step_ns_D, model.step_ns, rtol=1e-6)


def test_without_variation_every_draw_is_the_runs_step():
    """Exactly, and so with a profile at hand."""
    recording = replace(null_run(pipeline_job(2, 3, 4, 4)), is_still=True)
    model, found = drawn(recording, draws=4)
    assert set(found.step_ns_D.tolist()) == {model.step_ns}


def test_ranks_without_kernels_are_drawn_as_they_are():
    """A stage that launches nothing has no kinds that vary, and holds up none that do."""
    recording = null_run(pipeline_job(2, 2, 2, 4))
    modelled = recording.modelled_job
    first, second = modelled.compositions
    none_BK = np.zeros((len(second.share_BK), 0))
    idle = Composition(kinds=(), share_BK=none_BK, square_BK=none_BK)
    recording = replace(recording, modelled_job=replace(modelled, compositions=(first, idle)))
    model, found = drawn(recording, draws=16)
    assert found.step_ns_D.std() > 0
    still = VariabilityProfile(name="still")
    modelled = replace(recording.modelled_job, profile=still)
    _, found = drawn(replace(recording, modelled_job=modelled), draws=4)
    np.testing.assert_allclose(found.step_ns_D, model.step_ns, rtol=1e-6)


def test_every_source_widens_and_can_be_switched_off():
    """Without all of them nothing varies; each alone varies."""
    model, _ = drawn(null_run(pipeline_job(2, 2, 2, 4), devices_per_node=2), draws=8)
    config = model.drawn(MonteCarlo(draws=64))
    for name in SOURCES:
        others = [other for other in SOURCES if other != name]
        source = model.source.without(*others)
        assert draw_steps(model.graph, source, config, base=model.base).step_ns_D.std() > 0
    still = draw_steps(model.graph, model.source.without(*SOURCES), config, base=model.base)
    np.testing.assert_allclose(still.step_ns_D, model.step_ns, rtol=1e-6)


def test_switching_a_source_off_leaves_the_draws_of_the_others():
    """Streams of random numbers are apart: without links the computation is drawn as before."""
    recording = null_run(pipeline_job(2, 2, 2, 4))
    model, _ = drawn(recording, draws=8)
    chunk = Chunk(index=0, draws=5, seed=3)
    rank_class = model.graph.classes[0]
    node = int(np.flatnonzero(rank_class.trace.computes_B)[0])
    bodies = [
        source.chunk(chunk).body(0, 2)[node]
        for source in (model.source, model.source.without("links", "spatial"))
    ]
    alone = model.source.without("spatial").chunk(chunk).body(0, 2)[node]
    assert bodies[1].tolist() == alone.tolist()
    assert bodies[0].tolist() != bodies[1].tolist()


def test_devices_keep_their_speed_through_a_run():
    """Spatial variation alone: all steps of a draw are equal, and draws differ."""
    profile = VariabilityProfile(name="spatial", kernels={"gemm": KernelVariation(spatial_cv=0.05)})
    _, found = drawn(null_run(pipeline_job(2, 2, 2, 4), profile))
    assert np.ptp(found.by_run_AT, axis=1).max() <= 1
    assert found.step_ns_D.std() > 0.005 * found.step_ns_D.mean()


def test_medians_of_what_moves_the_whole_job_hardly_depend_on_the_seed():
    """One pace a step, drawn evenly; each draw has the distribution that the profile states."""
    profile = VariabilityProfile(name="one", regimes=RegimeVariation(drift_cv=0.02))
    recording = null_run(pipeline_job(2, 3, 4, 4), profile)
    of_seeds = [drawn(recording, draws=200, seed=seed)[1].step_ns_D for seed in range(8)]

    medians = [float(np.median(steps_D)) for steps_D in of_seeds]
    # Independent draws would have 0.2 %: 1.25 × 0.02 / √200.
    assert np.std(medians) / np.mean(medians) < 0.0005
    together = np.log(np.concatenate(of_seeds))
    assert together.std() == pytest.approx(0.02, rel=0.05)
    low, middle, high = np.quantile(together, [0.05, 0.5, 0.95])
    assert high - middle == pytest.approx(1.645 * 0.02, rel=0.05)
    assert middle - low == pytest.approx(1.645 * 0.02, rel=0.05)


def test_the_spread_between_runs_is_told_from_that_between_steps():
    """Both as they were drawn."""
    rng = np.random.default_rng(0)
    runs = rng.normal(1e9, 2e7, (4_000, 1)) + rng.normal(0, 1e7, (4_000, 8))
    spread = RunSpread.of(np.rint(runs).astype(np.int64))
    assert spread.between_cv == pytest.approx(0.02, rel=0.05)
    assert spread.within_cv == pytest.approx(0.01, rel=0.05)
    assert spread.within_p95 == pytest.approx(0.01645, rel=0.05)


def test_a_log_shows_a_rare_stall_or_does_not():
    """One step in five hundred takes twice as long: half of all logs have none, and their CV is
    that of the other steps; one in twenty has two and more."""
    rng = np.random.default_rng(0)
    steps = np.rint(rng.normal(1e9, 1e6, (5_000, 8)))
    steps[::62, 3] += 1e9
    spread = RunSpread.of(steps.astype(np.int64), log_steps=250)
    assert spread.log.steps == 250
    assert spread.log.cv_low == pytest.approx(0.001, rel=0.2)
    assert spread.log.cv_high == pytest.approx(np.sqrt(2 / 250), rel=0.1)
    assert spread.within_cv == pytest.approx(np.sqrt(1 / 500), rel=0.1)


def test_long_stalls_come_by_the_job_and_not_by_its_size():
    """As many in two nodes as in eight; each as long as it says, for the whole job."""
    profile = VariabilityProfile(
        name="long", stalls=StallVariation(long_per_job_hour=36_000, long_mean_s=0.05)
    )
    late = []
    for replicas in (2, 8):
        model, found = drawn(null_run(pipeline_job(2, replicas, 4, 4), profile), draws=4_000)
        extra_s = (found.step_ns_D - model.step_ns) / 1e9
        expected = 10 * model.step_ns / 1e9
        late.append(float((extra_s > 1e-5).mean()))
        assert extra_s.mean() == pytest.approx(expected * 0.05, rel=0.25)
    assert late[0] == pytest.approx(late[1], rel=0.25)


def test_many_small_kernels_vary_less_than_one_large_one():
    """The deviation of a sum of a hundred falls to a tenth of its share."""
    profile = VariabilityProfile(
        name="temporal", kernels={"gemm": KernelVariation(temporal_cv=0.05)}
    )
    graph = pipeline_job(1, 1, 1, 1)
    spread = [
        RunSpread.of(drawn(null_run(graph, profile, kernels=k), draws=4_000)[1].by_run_AT)
        for k in (1, 100)
    ]
    assert spread[0].within_cv == pytest.approx(10 * spread[1].within_cv, rel=0.1)


@pytest.mark.parametrize("kernels", [1, 50])
def test_sets_drawn_as_one_have_the_distribution_of_all_ranks(kernels):
    """Tensor-parallel ranks that a collective follows node by node, slow devices among them."""
    links = {"nvlink": ALL.link("nvlink"), "rail": LinkVariation(temporal_cv=0.05, pair_cv=0.05)}
    profile = without(ALL, stalls=StallVariation(), links=links)
    recording = null_run(pipeline_job(2, 2, 4, 4), profile, kernels=kernels)
    small, as_sets = drawn(recording, draws=4_000)
    whole, one_by_one = drawn(recording, draws=4_000, seed=1, fused=False)
    assert small.graph.world_size * 4 == whole.graph.world_size
    at = [0.05, 0.5, 0.95]
    quantiles = [np.quantile(d.step_ns_D, at) for d in (as_sets, one_by_one)]
    np.testing.assert_allclose(quantiles[0], quantiles[1], rtol=4e-3)


def test_a_set_stalls_as_often_as_all_the_groups_it_stands_for():
    """Four groups in parallel, each with its own chance."""
    profile = VariabilityProfile(
        name="tails", links={"rail": LinkVariation(tail_probability=0.01, tail_factor=5.0)}
    )
    recording = null_run(pipeline_job(2, 2, 4, 4), profile)
    _, as_sets = drawn(recording, draws=4_000)
    whole, one_by_one = drawn(recording, draws=4_000, seed=1, fused=False)
    late = [float((d.step_ns_D > 1.01 * whole.step_ns).mean()) for d in (as_sets, one_by_one)]
    assert late[0] == pytest.approx(late[1], abs=0.02)
    assert late[0] > 0.02


def test_chunks_share_out_runs():
    """A thousand steps are a hundred and twenty-five runs of eight."""
    chunks = chunks_of(MonteCarlo(draws=1_000, counted=8), draw_bytes=1)
    assert sum(c.draws for c in chunks) == 125


def test_shares_of_sources_are_what_the_spread_loses():
    """A source that does nothing has none of it; the one that does all has all."""
    profile = VariabilityProfile(name="one", regimes=RegimeVariation(drift_cv=0.01))
    model, _ = drawn(null_run(pipeline_job(2, 2, 1, 4), profile), draws=8)
    config = model.drawn(MonteCarlo(draws=200))

    def draw(name):
        source = model.source if name is None else model.source.without(name)
        return draw_steps(model.graph, source, config, base=model.base)

    shares = {s.name: s.share for s in variation_shares(draw, SOURCES)}
    assert shares.pop("regimes") == pytest.approx(1.0, abs=1e-3)
    assert all(share == pytest.approx(0.0, abs=1e-3) for share in shares.values())


def test_sensitivity_names_kinds_collectives_stages_and_sources():
    """Each can be made steady; what is steadied lowers the p95."""
    model, _ = drawn(null_run(pipeline_job(2, 2, 2, 4)), draws=8)
    names, freeze = factors_of(model.source)
    assert {"gemm kernels", "stage 1 computation", "spatial variation"} <= set(names)
    assert any(name.startswith("all_reduce") for name in names)
    found = ablate(
        model.graph,
        ["gemm kernels", "spatial variation"],
        freeze,
        model.drawn(MonteCarlo(draws=400)),
        base=model.base,
    )
    gains = {a.name: a.p95_gain for a in found.ablations}
    assert gains["gemm kernels"] >= gains["spatial variation"] > 0


def test_the_slowest_of_a_set_is_as_clark_says():
    """Against drawing every member."""
    rng = np.random.default_rng(0)
    slow_DKM = rng.standard_normal((4, 8, 3)).astype(np.float32)
    for ratio in (0.0, 0.3, 2.0):
        mean, deviation = greatest(slow_DKM, ratio)
        chance = ratio * rng.standard_normal((20_000, *slow_DKM.shape))
        every = (slow_DKM + chance).max(axis=2)
        np.testing.assert_allclose(mean, every.mean(axis=0), atol=0.03 * max(ratio, 0.1))
        np.testing.assert_allclose(deviation, every.std(axis=0), rtol=0.09, atol=1e-3)
    assert largest_of_equal(8) == pytest.approx((1.4236, 0.6107), rel=1e-2)


def test_devices_of_a_node_may_be_alike():
    """All of the variance in common: eight devices, one slowness."""
    rng = np.random.default_rng(0)
    node_R = np.repeat(np.arange(4), 8)
    alike = slowness(rng, 50, node_R, 1.0)
    assert np.ptp(alike.reshape(50, 4, 8), axis=2).max() == 0
    half = slowness(rng, 4_000, node_R, 0.5)
    together = np.corrcoef(half[:, 0], half[:, 1])[0, 1]
    assert together == pytest.approx(0.5, abs=0.05)


def test_links_are_told_by_where_a_groups_ranks_sit():
    """Within a node, between nodes of a pod, between pods; a ring's slowest link counts."""
    ring = np.arange(64).reshape(64, 1) * 8
    assert crossing(np.arange(8).reshape(8, 1), 1, 8, 4).scope == "nvlink"
    assert crossing(ring[:4], 1, 8, 4).scope == "rail"
    assert crossing(ring, 1, 8, 4).scope == "pods"
    assert crossing(ring, 1, 8, 4).links == 64
    assert crossing(ring[:2], 1, 8, 4).links == 1


def test_the_largest_of_many_is_drawn_by_its_own_distribution():
    """Mean and deviation of the largest of eight normal variables."""
    found = largest(np.random.default_rng(0), 8, (500, 400))
    assert (found.mean(), found.std()) == pytest.approx((1.4236, 0.6107), rel=1e-2)


def test_a_stalled_machine_delays_all_of_its_ranks():
    """At the node that was under way, by as long as the stall."""
    stalls = StepStalls.drawn(
        np.random.default_rng(0), expected=8.0, mean_s=0.5, draws=10, machines=4
    )
    assert len(stalls.ns_E) == pytest.approx(80, rel=0.3)
    delays = stalls.delays(np.array([0, 0, 3]), np.array([5, 9]), np.array([0.25, 1.0]))
    of_first = int((stalls.machine_E == 0).sum())
    rows = [row for found in delays.values() for row in found]
    assert set(delays) <= {5, 9}
    assert sum(len(members) == 2 for _, members, _ in rows) == of_first


def test_unknown_sources_are_refused():
    """With those that there are."""
    model, _ = drawn(null_run(pipeline_job(2, 2, 1, 4)), draws=8)
    with pytest.raises(UsageError, match="unknown source wind; allowed: temporal, spatial"):
        model.source.without("wind")
