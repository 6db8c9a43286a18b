"""Ablated p95 and Sobol indices."""

import sys

import numpy as np
import pytest

from prismscale.cluster import Cluster
from prismscale.cost.collective import AnalyticCollectiveModel
from prismscale.errors import UsageError
from prismscale.forecast.distributions.duration_distribution import Normal
from prismscale.forecast.draws.fitting import fit_distributions
from prismscale.forecast.draws.lockstep import fuse
from prismscale.forecast.draws.montecarlo import MonteCarlo
from prismscale.forecast.draws.sampling import DistributionDraws, NodeDistribution
from prismscale.forecast.draws.variation import Variation, vary
from prismscale.forecast.model import model_of
from prismscale.forecast.recording import load_recording
from prismscale.forecast.sensitivity import ablate, factors_of
from prismscale.forecast.sobol import own_estimates, pick_freeze, salib_estimates, sobol_indices
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import collect_groups
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.io import save_graph
from prismscale.graph.node import CollectiveOp
from prismscale.validation.synthetic_job import (
    Layout,
    Move,
    PassCosts,
    build_layout,
    median_durations,
)
from support.forecast_jobs import recorded_run, small_graph


def fork_job():
    """Two serial kernels, and a wild one beside them that is never critical."""
    builder = TraceBuilder(rank=0, world_size=1)
    a = builder.add_compute(1, preds=[-1], label="a")
    hidden = builder.add_compute(1, preds=[-1], label="hidden", lane="other")
    b = builder.add_compute(1, preds=[a], label="b")
    builder.add_compute(0, preds=[b, hidden], label="join")
    traces = {0: builder.build()}
    one = np.zeros(1, dtype=np.int64)
    return assemble(traces, one, collect_groups(traces, 1, one))


@pytest.fixture
def source():
    table = (
        NodeDistribution(name="a", compute=Normal(mean=1e9, std=3e7)),
        NodeDistribution(name="hidden", compute=Normal(mean=5e8, std=1e8)),
        NodeDistribution(name="b", compute=Normal(mean=1e9, std=4e7)),
    )
    return DistributionDraws(
        graph=fork_job(), distributions=table, distribution_CB=(np.array([0, 1, 2, -1]),)
    )


CONFIG = MonteCarlo(draws=4_000, steps=1)


def test_the_wildest_kernel_is_not_the_most_important(source):
    """High variation off the critical path gains nothing; the ranking is by ablated p95."""
    names, freeze = factors_of(source)
    found = ablate(source.graph, names, freeze, CONFIG)
    assert [a.name for a in found.ablations] == ["b", "a", "hidden"]
    assert found.ablations[-1].p95_gain == pytest.approx(0, abs=1e-4)


def test_ablated_p95_is_that_of_what_is_left(source):
    """Freezing b leaves a's variation: mean + 1.645 of its standard deviation."""
    _, freeze = factors_of(source)
    found = ablate(source.graph, ["b"], freeze, CONFIG)
    assert found.ablations[0].p95_ns == pytest.approx(2e9 + 1.645 * 3e7, rel=2e-3)


def test_sobol_indices_of_a_sum_are_its_shares_of_variance(source):
    """For a + b with standard deviations 3 and 4: 9/25 and 16/25, without interactions."""
    found = {i.name: i for i in sobol_indices(source, ["a", "b", "hidden"], CONFIG)}
    assert found["a"].first == pytest.approx(9 / 25, abs=0.05)
    assert found["b"].total == pytest.approx(16 / 25, abs=0.05)
    assert found["hidden"].total == pytest.approx(0, abs=0.01)


def test_an_unknown_factor_is_named(source):
    """Asking for what is not there lists what is."""
    _, freeze = factors_of(source)
    with pytest.raises(UsageError, match="unknown gemm; there are: a, hidden, b"):
        ablate(source.graph, ["gemm"], freeze, CONFIG)


def test_salib_gives_the_same_indices(source):
    """From the same draws, to rounding; its intervals are as wide."""
    drawn = pick_freeze(source, ["a", "b", "hidden"], CONFIG)
    for own, theirs in zip(own_estimates(drawn), salib_estimates(drawn), strict=True):
        assert own.first == pytest.approx(theirs.first, abs=1e-9)
        assert own.total == pytest.approx(theirs.total, abs=1e-9)
        assert own.first_error == pytest.approx(theirs.first_error, rel=0.5, abs=1e-6)


def test_salib_that_is_missing_is_explained(source, monkeypatch):
    """Without SALib the message says how to install it, and what does without."""
    monkeypatch.setitem(sys.modules, "SALib", None)
    monkeypatch.setitem(sys.modules, "SALib.analyze.sobol", None)
    with pytest.raises(UsageError, match=r"pip install 'prismscale\[sensitivity\]'"):
        sobol_indices(source, ["a"], CONFIG, estimator="salib")


def test_steady_steps_have_no_indices(source):
    """Without variance nothing explains it."""
    still = source.freeze(frozenset({0, 1, 2}))
    drawn = pick_freeze(still, ["a"], MonteCarlo(draws=50, steps=1))
    assert own_estimates(drawn) == salib_estimates(drawn)
    assert own_estimates(drawn)[0].total == 0


def test_factors_are_kernels_stages_and_collectives(tmp_path):
    """Fitted distributions of a pipeline can be frozen by kernel and by stage, modelled ones by
    group."""
    samples = load_recording(recorded_run(small_graph(), tmp_path / "run"), "h100-sxm").samples
    source, _ = fit_distributions(samples)
    names, _ = factors_of(source)
    assert {"forward", "backward", "stage 1 computation"} <= set(names)
    save_graph(small_graph(), tmp_path / "graph")
    modelled = model_of(load_recording(tmp_path, "h100-sxm"), method="fitted").source
    assert "send forward pp-forward×2" in factors_of(modelled)[0]


def test_a_fused_graph_is_frozen_before_it_is_fused():
    """Tensor-parallel collectives can be made steady alone although chains hold them."""
    costs = PassCosts(
        forward_ns=10**6,
        backward_ns=2 * 10**6,
        forward_moves=(Move(CollectiveOp.ALL_REDUCE, 2**20),) * 2,
        backward_moves=(Move(CollectiveOp.ALL_REDUCE, 2**20),) * 2,
    )
    graph = build_layout(Layout(tp=2, pp=2, dp=1, microbatches=2), costs)
    model = AnalyticCollectiveModel(Cluster.load("h100-sxm"))
    whole = vary(graph, median_durations(graph, model), Variation(communication_cv=0.5))
    fused = fuse(graph)
    names, freeze = factors_of(whole, fused)
    found = ablate(fused.graph, names, freeze, MonteCarlo(draws=500, steps=1))
    gains = {a.name: a.std_gain for a in found.ablations}
    assert gains["tp all_reduce"] > 0.01
    assert gains["forward"] > 0.01
