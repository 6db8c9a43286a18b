"""Ablated p95 and Sobol indices."""

import numpy as np
import pytest

from prismscale.errors import UsageError
from prismscale.forecast.distributions import Normal
from prismscale.forecast.montecarlo import MonteCarlo
from prismscale.forecast.sampling import LawDraws, NodeLaw
from prismscale.forecast.sensitivity import ablate, factors_of, sobol_indices
from prismscale.graph.assemble import assemble
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.groups import collect_groups


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
        NodeLaw(name="a", compute=Normal(mean=1e9, std=3e7)),
        NodeLaw(name="hidden", compute=Normal(mean=5e8, std=1e8)),
        NodeLaw(name="b", compute=Normal(mean=1e9, std=4e7)),
    )
    return LawDraws(graph=fork_job(), laws=table, law_CB=(np.array([0, 1, 2, -1]),))


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
    _, freeze = factors_of(source)
    found = {i.name: i for i in sobol_indices(source.graph, ["a", "b", "hidden"], freeze, CONFIG)}
    assert found["a"].first == pytest.approx(9 / 25, abs=0.05)
    assert found["b"].total == pytest.approx(16 / 25, abs=0.05)
    assert found["hidden"].total == pytest.approx(0, abs=0.01)


def test_an_unknown_factor_is_named(source):
    """Asking for what is not there lists what is."""
    _, freeze = factors_of(source)
    with pytest.raises(UsageError, match="unknown gemm; there are: a, hidden, b"):
        ablate(source.graph, ["gemm"], freeze, CONFIG)
