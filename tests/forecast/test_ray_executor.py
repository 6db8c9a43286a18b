"""Draws on a real Ray cluster of two nodes on this machine."""

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from prismscale.cost.collective import NullCollectiveModel
from prismscale.errors import UsageError
from prismscale.forecast.draws.executor import RayCluster, Serial
from prismscale.forecast.draws.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.draws.variation import Variation, vary
from prismscale.validation.synthetic_job import median_durations
from support.forecast_jobs import small_graph


@pytest.fixture(scope="module")
def two_nodes():
    """A head and a worker node, one core each."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_draws_are_those_of_one_process_bit_for_bit(two_nodes):
    """Chunks go to both nodes; the distribution does not depend on where it is drawn."""
    graph = small_graph()
    source = vary(graph, median_durations(graph, NullCollectiveModel()), Variation())
    config = MonteCarlo(draws=600)
    there = draw_steps(graph, source, config, executor=RayCluster(address=two_nodes.address))
    here = draw_steps(graph, source, config, executor=Serial())
    assert np.array_equal(here.step_ns_D, there.step_ns_D)
    assert not ray.is_initialized()


def test_both_nodes_are_there(two_nodes):
    """The cluster that the draws ran on has two nodes."""
    ray.init(address=two_nodes.address, log_to_driver=False)
    try:
        assert sum(node["Alive"] for node in ray.nodes()) == 2
    finally:
        ray.shutdown()


def test_a_cluster_that_is_not_there_is_named():
    """The address is in the message."""
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:1"):
        list(RayCluster(address="127.0.0.1:1").map(max, 1, [2]))
