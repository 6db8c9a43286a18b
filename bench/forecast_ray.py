"""Draws on a real Ray cluster of two nodes on this machine: bit for bit those of one process.

Needs ``pip install prismscale[ray]``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster as RayTestCluster

from prismscale.cost.collective import NullCollectiveModel
from prismscale.forecast.draws.executor import RayCluster, Serial
from prismscale.forecast.draws.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.draws.variation import Variation, vary
from prismscale.validation.rows import Row, finish
from prismscale.validation.synthetic_job import Layout, PassCosts, build_layout, median_durations

COSTS = PassCosts(forward_ns=10**7, backward_ns=2 * 10**7, optimizer_ns=10**6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    graph = build_layout(Layout(tp=1, pp=4, dp=16, microbatches=16), COSTS)
    source = vary(graph, median_durations(graph, NullCollectiveModel()), Variation())
    config = MonteCarlo(draws=1_000)
    began = time.perf_counter()
    here = draw_steps(graph, source, config, executor=Serial()).step_ns_D
    serial_s = time.perf_counter() - began
    cluster = RayTestCluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        nodes = sum(node["Alive"] for node in ray.nodes())
        began = time.perf_counter()
        there = draw_steps(graph, source, config, executor=RayCluster()).step_ns_D
        ray_s = time.perf_counter() - began
    finally:
        ray.shutdown()
        cluster.shutdown()
    rows = [
        Row.at_least("Ray nodes", nodes, 2),
        Row.at_most("draws that differ from one process", int((here != there).sum()), 0),
        Row.told("1,000 draws in one process", serial_s, "s"),
        Row.told("the same on Ray, start of its workers included", ray_s, "s"),
    ]
    return finish(rows, title="Ray executor", json_path=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
