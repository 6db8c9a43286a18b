"""A small run of the null device, as it is stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from prismscale.cluster import Cluster
from prismscale.cost.launch_log import LaunchLog, NodePath, save_launch_log
from prismscale.cost.variability import VariabilityProfile
from prismscale.durations.recosting import CostSettings, launches_path, trace_path
from prismscale.durations.scenario import Scenario
from prismscale.graph.io import save_graph, save_trace
from prismscale.graph.job_graph import JobGraph
from prismscale.runfolder import RunFolder
from support.jobs import pipeline_job

H100 = Cluster.load("h100-sxm")
COSTS = CostSettings()
PRODUCT = "\x1f".join(
    ("aten::mm", "BFloat16[4096,4096];BFloat16[4096,4096]", "BFloat16[4096,4096]", "")
)


def stored_null_run(root: Path, *, replicas: int = 4) -> Path:
    """Two stages, tensor-parallel degree 2; every computation is one matrix product. Eight ranks
    are a node."""
    graph = _costed(pipeline_job(2, replicas, 2, 4))
    folder = RunFolder(root=root)
    save_graph(graph, folder.graph)
    captures = folder.root / "captures" / "abc"
    captures.mkdir(parents=True)
    for rank_class in graph.classes:
        trace = rank_class.trace
        nodes = np.flatnonzero(trace.computes_B).astype(np.int32)
        entries = np.arange(len(nodes), dtype=np.int32)
        log = LaunchLog(
            signatures=(PRODUCT,),
            signature_E=np.zeros(len(nodes), np.int32),
            lane_E=np.ones(len(nodes), np.int32),
            stated_ns_E=np.zeros(len(nodes), np.int64),
            node_N=nodes,
            path_N=np.full(len(nodes), NodePath.WORK, np.int32),
            lane_N=np.ones(len(nodes), np.int32),
            since_N=entries,
            first_N=entries,
            stop_N=entries + 1,
        )
        save_launch_log(log, launches_path(captures, trace.rank))
        save_trace(trace, trace_path(captures, trace.rank))
    scenario = Scenario(
        cluster=H100,
        kernel_costs=COSTS,
        captures="captures/abc",
        variability=VariabilityProfile.load("measured"),
    )
    scenario.save(folder.scenario)
    return folder.root


def _costed(graph: JobGraph) -> JobGraph:
    """``graph`` whose computations take what a product takes, as its captures would have it."""
    product_ns = round(COSTS.model(H100.device).cost(PRODUCT).device_ns)
    classes = []
    for rank_class in graph.classes:
        trace = rank_class.trace
        body_ns_SB = np.where(trace.computes_B, product_ns, trace.body_ns_SB)
        classes.append(replace(rank_class, trace=replace(trace, body_ns_SB=body_ns_SB)))
    return replace(graph, classes=tuple(classes))
