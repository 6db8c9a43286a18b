"""Pools of durations: signatures, spatial and temporal variation, bubbles."""

from dataclasses import replace

import numpy as np
import pytest

from prismscale.durations.samples import StepSamples
from prismscale.errors import FormatError
from prismscale.forecast.distributions.pools import otsu_threshold, pools_of, rank_factors
from prismscale.forecast.draws.fitting import fit_distributions
from prismscale.forecast.draws.montecarlo import Chunk, MonteCarlo, draw_steps
from prismscale.forecast.draws.replay import JointGroup, ReplayDraws, fit_step_regimes, regimes_of
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import collect_groups
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.node import CollectiveOp

STEPS, RANKS = 40, 4


@pytest.fixture
def samples():
    """Four ranks, one 1.5 times slower; a collective that two of 40 steps find congested."""
    rng = np.random.default_rng(0)
    builder = TraceBuilder(rank=0, world_size=RANKS)
    builder.add_compute([1] * STEPS, preds=[-1], label="gemm")
    builder.add_communication(CollectiveOp.ALL_REDUCE, 8, preds=[0], durations_ns=[1] * STEPS)
    builder.add_compute([0] * STEPS, preds=[1], label="end")
    traces = {0: builder.build()}
    one = np.zeros(RANKS, dtype=np.int64)
    base = StepSamples.from_graph(assemble(traces, one, collect_groups(traces, RANKS, one)))
    gemm = rng.normal(1e6, 1e4, (STEPS, RANKS)) * np.array([1, 1, 1.5, 1])
    reduce = rng.normal(1e5, 1e3, (STEPS, 1))
    reduce[[7, 21]] *= 20
    body = tuple(np.rint(a).astype(np.int64) for a in (gemm, reduce, np.zeros((STEPS, 1))))
    own = replace(base.classes[0], body_ns=body, column_M=np.arange(RANKS))
    return replace(base, classes=(own,))


def test_spatial_and_temporal_variation_are_kept_apart(samples):
    """A slow rank is spatial variation; what a rank does from step to step is temporal."""
    pool = next(p for p in pools_of(samples) if p.signature.label == "gemm")
    assert pool.spatial_cv == pytest.approx(0.19, abs=0.01)
    assert pool.temporal_cv == pytest.approx(0.01, abs=0.003)


def test_a_slow_rank_has_its_factor(samples):
    """Factors are those that the durations were made with."""
    assert rank_factors(samples) == pytest.approx([1, 1, 1.5, 1], rel=0.01)


def test_fitted_draws_keep_worker_identity(samples):
    """With factors taken out and put back, the slow rank sets the step in every draw."""
    source, fitted = fit_distributions(samples)
    gemm = next(f for f in fitted if f.pool.signature.label == "gemm")
    assert gemm.fit.distribution.quantile(np.array([0.5])) == pytest.approx([1e6], rel=5e-3)
    drawn = draw_steps(samples.graph, source, MonteCarlo(draws=500, steps=1)).step_ns_D
    assert np.median(drawn) == pytest.approx(1.6e6, rel=0.01)


def test_congested_steps_are_a_regime(samples):
    """Two of 40 steps are told apart, and draws hold them as often."""
    regimes = regimes_of(samples)
    assert np.flatnonzero(regimes).tolist() == [7, 21]
    source = ReplayDraws(samples=samples, regime_T=regimes)
    drawn = draw_steps(samples.graph, source, MonteCarlo(draws=2_000, steps=1)).step_ns_D
    assert (drawn > 3e6).mean() == pytest.approx(2 / STEPS, abs=0.02)


def test_a_regime_lasts_over_simulated_steps(samples):
    """After a congested step another is as likely as the data say, not as the shares say."""
    found = fit_step_regimes(samples)
    lasting = replace(found, transition_KK=np.array([[0.9, 0.1], [0.1, 0.9]]))
    source = ReplayDraws(samples=samples, regime_T=found.state_S, regimes=lasting)
    durations = source.chunk(Chunk(index=0, draws=4_000, seed=0))
    state = [found.state_S[durations.base_D(step)] for step in (0, 1)]
    assert state[1][state[0] == 1].mean() == pytest.approx(0.9, abs=0.06)
    assert state[1][state[0] == 0].mean() == pytest.approx(0.1, abs=0.03)


def test_fitted_laws_hold_the_regime(samples):
    """The congested regime scales the collective of all of a step, as often as recorded."""
    source, _ = fit_distributions(samples)
    assert source.regime_share_K == pytest.approx([0.95, 0.05])
    drawn = draw_steps(samples.graph, source, MonteCarlo(draws=2_000, steps=1)).step_ns_D
    assert (drawn > 3e6).mean() == pytest.approx(2 / STEPS, abs=0.02)


def test_collectives_drawn_for_each_member_are_slower(samples):
    """The switch shows what drawing once is worth: the slowest of four draws is congested more
    often."""
    config = MonteCarlo(draws=2_000, steps=1)
    apart = ReplayDraws(samples=samples, together=JointGroup(collective=False))
    drawn = draw_steps(samples.graph, apart, config).step_ns_D
    assert (drawn > 3e6).mean() == pytest.approx(1 - 0.95**4, abs=0.03)


def test_one_step_replays_itself(samples):
    """Draws from a single recorded step are that step."""
    single = samples.select([3])
    drawn = draw_steps(samples.graph, ReplayDraws(samples=single), MonteCarlo(draws=5, steps=1))
    gemm, reduce, _ = (a[0] for a in single.classes[0].body_ns)
    assert set(drawn.step_ns_D.tolist()) == {int(gemm.max() + reduce[0])}


def test_frozen_nodes_stay_at_their_median(samples):
    """With the collective frozen no draw is congested."""
    source = ReplayDraws(samples=samples, frozen=frozenset({(0, 1)}))
    drawn = draw_steps(samples.graph, source, MonteCarlo(draws=500, steps=1)).step_ns_D
    assert drawn.max() < 2e6


def test_small_pools_are_reported(samples):
    """Three recorded steps cannot be fitted, and the draws say so."""
    source, fitted = fit_distributions(samples.select([0, 1, 2]))
    assert "too small" in source.notes[0]
    assert any("only 3 durations" in f.fit.note for f in fitted)


def test_otsu_cuts_between_two_modes():
    """The threshold lies between transfers and transfers with waiting."""
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(1e6, 1e5, 50), rng.normal(2e7, 1e6, 20)])
    assert 1.5e6 < otsu_threshold(values) < 1.6e7


def pipeline_samples(longest):
    """Two stages; the first sends two microbatches, whose recorded times are given."""
    n = len(longest)
    stages = []
    for stage in range(2):
        builder = TraceBuilder(rank=stage, world_size=2)
        last = builder.add_compute([1] * n, preds=[-1], label="work")
        for _ in range(3):
            op = CollectiveOp.SEND if stage == 0 else CollectiveOp.RECV
            sent = builder.add_communication(op, 8, peer=1, preds=[last], durations_ns=[1] * n)
            last = builder.add_compute([1] * n, preds=[sent], label="work")
        stages.append(builder.build())
    traces = dict(enumerate(stages))
    own = np.arange(2)
    base = StepSamples.from_graph(assemble(traces, own, collect_groups(traces, 2, own)))
    first = list(base.classes[0].body_ns)
    for node, scale in ((1, 1.0), (3, 1.05), (5, 30.0)):
        first[node] = (np.asarray(longest)[:, None] * scale).astype(np.int64)
    classes = (replace(base.classes[0], body_ns=tuple(first)), *base.classes[1:])
    return replace(base, classes=classes)


def test_positions_that_ever_bubble_have_a_pool_of_their_own():
    """A send position that holds waiting is not pooled with those that never do."""
    found = [p for p in pools_of(pipeline_samples([1e6] * 10)) if p.ever_bubble is not None]
    assert {p.ever_bubble: len(p.nodes) for p in found} == {False: 2, True: 1}


def test_work_of_one_name_and_two_sizes_is_not_pooled():
    """A computation that takes a thousand times longer at one position has a pool of its own."""
    samples = pipeline_samples([1e6] * 10)
    first = list(samples.classes[0].body_ns)
    for node, ns in ((0, 10**3), (2, 10**3), (4, 10**3), (6, 10**6)):
        first[node] = np.full((10, 1), ns)
    classes = (replace(samples.classes[0], body_ns=tuple(first)), *samples.classes[1:])
    found = [p for p in pools_of(replace(samples, classes=classes)) if p.signature.stage == 0]
    work = [len(p.nodes) for p in found if p.signature.label == "work"]
    assert sorted(work) == [1, 3]


def test_negative_durations_are_refused(samples):
    """By the recording itself, with the class named."""
    bad = tuple(-a for a in samples.classes[0].body_ns)
    with pytest.raises(FormatError, match="class 0: negative"):
        replace(samples, classes=(replace(samples.classes[0], body_ns=bad),))
