"""Nodes of unequal speed on stages and replicas."""

import itertools

import numpy as np
import pytest

from prismscale.cost.collective import NullCollectiveModel
from prismscale.errors import FormatError, UsageError
from prismscale.forecast.draws.sampling import DistributionDraws
from prismscale.forecast.draws.variation import Variation, vary
from prismscale.forecast.placement.node_placement import (
    Evaluator,
    count_placements,
    different_placements,
    hot_node_study,
    place,
)
from prismscale.forecast.placement.nodes import ClusterNode, read_nodes
from prismscale.validation.synthetic_job import Layout, PassCosts, build_layout, median_durations

PP, DP = 3, 2
NODE_SLOTS = [(stage * DP + replica,) for replica in range(DP) for stage in range(PP)]
REPLICAS = [replica for replica in range(DP) for _ in range(PP)]


@pytest.fixture(scope="module")
def source_for():
    """An unbalanced pipeline: the last stage has more work."""
    layout = Layout(tp=1, pp=PP, dp=DP, microbatches=4)
    costs = PassCosts(forward_ns=10**6, backward_ns=2 * 10**6, last_stage_ns=10**6)
    graph = build_layout(layout, costs)
    still = Variation(compute_cv=0.0, communication_cv=0.0)
    source = vary(graph, median_durations(graph, NullCollectiveModel()), still)

    def build(factor_R):
        distributions = DistributionDraws(
            graph=graph,
            distributions=source.distributions,
            distribution_CB=source.distribution_CB,
            factor_R=factor_R,
        )
        return distributions, None

    build.graph = graph
    return build


def evaluator(source_for, factors):
    nodes = [ClusterNode(name=f"n{i}", factor=f) for i, f in enumerate(factors)]
    return Evaluator(source_for.graph, source_for, NODE_SLOTS, nodes, draws=1), nodes


def test_a_slow_node_belongs_where_there_is_slack(source_for):
    """One slow node is kept away from the loaded last stage."""
    evaluate, nodes = evaluator(source_for, [1, 1, 1.3, 1, 1, 1])
    found = place(evaluate, nodes, REPLICAS)
    assert found.exhaustive
    node_slot = found.best.node_S.index(2)
    assert node_slot % PP < PP - 1
    assert found.gain > 1.1
    assert found.spread >= 0.08


def test_exhaustive_search_misses_nothing(source_for):
    """The best of the placements that differ is the best of all of them."""
    factors = [1.0, 1.0, 1.1, 1.1, 1.25, 1.4]
    evaluate, nodes = evaluator(source_for, factors)
    best = place(evaluate, nodes, REPLICAS, exhaustive=True).best.step_ns
    assert best == min(evaluate(p).step_ns for p in itertools.permutations(range(6)))


def test_the_search_comes_near_the_optimum(source_for):
    """Annealing reaches 0.98 of the exhaustive optimum."""
    evaluate, nodes = evaluator(source_for, [1.3, 1.02, 1.1, 1.0, 1.05, 1.2])
    best = place(evaluate, nodes, REPLICAS, exhaustive=True).best.step_ns
    found = place(evaluate, nodes, REPLICAS, exhaustive=False, rounds=150).best.step_ns
    assert best / found >= 0.98


def test_spare_nodes_stand_in_for_slow_ones(source_for):
    """With one node too many, the slowest is left out."""
    evaluate, nodes = evaluator(source_for, [1.5, 1, 1, 1, 1, 1, 1])
    assert 0 not in place(evaluate, nodes, REPLICAS).best.node_S


def test_placements_are_counted_up_to_symmetry():
    """One slow node among equal ones has as many places as a replica has node slots."""
    nodes = [ClusterNode(name=str(i), factor=1.0 + (i == 0)) for i in range(6)]
    assert len(list(different_placements(nodes, REPLICAS))) == PP
    assert count_placements(nodes, REPLICAS) == PP


def test_a_hot_node_costs_most_on_the_loaded_stage(source_for):
    """The study covers every node slot and factor, and ranks node slots as the load does."""
    evaluate, _ = evaluator(source_for, np.ones(6))
    found = hot_node_study(evaluate.with_factors, 6, [1.1, 1.5])
    assert len(found) == 12
    by_slot = {h.node_slot: h.slowdown for h in found if h.factor == 1.5}
    assert max(by_slot, key=by_slot.get) % PP == PP - 1
    assert 0 < by_slot[0] < max(by_slot.values())


def test_nodes_are_read_by_factor_or_speed(tmp_path):
    """Speed is the inverse of the factor."""
    (tmp_path / "a.csv").write_text("node,speed\nx,0.5\ny,1\n")
    assert [n.factor for n in read_nodes(tmp_path / "a.csv")] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node,factor\nx,fast\n", "line 2: expected columns"),
        ("name,factor\nx,1\n", "line 2: expected columns"),
        ("node,factor\nx,1\ny,-1\n", "line 3: factor -1.0"),
        ("node,factor\nx,1\nx,1\n", "named twice: x"),
    ],
)
def test_bad_node_files_name_the_line(tmp_path, text, says):
    """What is wrong, and where."""
    (tmp_path / "n.csv").write_text(text)
    with pytest.raises(FormatError, match=says):
        read_nodes(tmp_path / "n.csv")


def test_too_few_nodes_are_refused(source_for):
    """Every node slot needs a node."""
    with pytest.raises(UsageError, match="2 nodes for 6 node_slots"):
        evaluator(source_for, np.ones(2))


def test_thousands_of_seats_are_gone_through():
    """One slow node among equal replicas: every place is the same."""
    nodes = [ClusterNode(name=f"n{i}", factor=1.2 if i == 7 else 1.0) for i in range(3000)]
    (placed,) = different_placements(nodes, list(range(3000)))
    assert placed[-1] == 7
