"""The cost of a forecast: draws of a job of 8,192 ranks, and the curve up to 65,536 ranks.

The job is TP 8 × PP 16 × DP, 1F1B with 64 microbatches and 16 tensor-parallel collectives in each
pass. It has 35.5 million rank-nodes per step at 8,192 ranks. Draws run on the fused graph
(:mod:`~prismscale.forecast.draws.lockstep`). A check on a small job shows that the fused graph has
the distribution of the whole one.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, replace

import numpy as np

from prismscale.cluster import Cluster
from prismscale.cost.collective import AnalyticCollectiveModel
from prismscale.errors import GraphError
from prismscale.forecast.draws.executor import LocalProcesses
from prismscale.forecast.draws.lockstep import FusedGraph, fuse
from prismscale.forecast.draws.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.draws.sampling import DistributionDraws, fuse_distributions
from prismscale.forecast.draws.variation import Variation, vary
from prismscale.graph.node import CollectiveOp
from prismscale.validation.goodness import ks_two_sample
from prismscale.validation.rows import Row
from prismscale.validation.synthetic_job import (
    Layout,
    Move,
    PassCosts,
    build_layout,
    median_durations,
)

COSTS = PassCosts(
    forward_ns=10**7,
    backward_ns=2 * 10**7,
    optimizer_ns=2 * 10**7,
    forward_moves=(Move(CollectiveOp.ALL_REDUCE, 2**25),) * 16,
    backward_moves=(Move(CollectiveOp.ALL_REDUCE, 2**25),) * 16,
    boundary_bytes=2**25,
    step_moves=(Move(CollectiveOp.ALL_REDUCE, 2**30, "dp"),),
)
VARIATION = Variation(compute_cv=0.03, communication_cv=0.1, stall_probability=1e-5)
CURVE = {8: 1_024, 64: 8_192, 128: 16_384, 256: 32_768, 512: 65_536}
"""World size by data-parallel width."""
BARRED = 64
"""Data-parallel width of the job whose time has a bar."""
FEWER = 4
"""Divisor of the number of draws for larger jobs, because time is proportional to it and the curve
should take minutes."""
REJECTED_AT_1_PERCENT = 1.63
"""Multiplied by √(2/n), this is the KS distance that two samples of n from equal distributions
exceed in one case of a hundred."""


@dataclass(frozen=True, kw_only=True)
class ScaleJob:
    """Distributions of a job, on the whole graph and on the fused one."""

    whole: DistributionDraws
    fused: FusedGraph
    distributions: DistributionDraws
    prepared_s: float


def validate(
    *, draws: int = 1_000, workers: int = 2, steps: int = 2, most_ranks: int = 65_536
) -> list[Row]:
    """Return all rows of this module. Timings are meaningful only on an idle machine.

    Args:
        draws: draws of the job with a bar and of smaller jobs; divided by :data:`FEWER` for larger
            ones.
        workers: number of local processes; the bar is for two cores.
        steps: simulated steps per draw.
        most_ranks: largest world size of the curve.
    """
    rows = check_small(2_000)
    for dp, ranks in CURVE.items():
        if ranks <= most_ranks:
            rows += measure(dp, draws if dp <= BARRED else draws // FEWER, workers, steps)
            if dp == BARRED:
                name = "8,192 ranks: peak memory, this process and twice its largest worker"
                rows.append(Row.at_most(name, peak_rss_gb(), 8.0, "GB"))
    return rows


def prepare(layout: Layout) -> ScaleJob:
    """Build and fuse the job of a layout."""
    began = time.perf_counter()
    graph = build_layout(layout, COSTS)
    model = AnalyticCollectiveModel(Cluster.load("h100-sxm"))
    whole = vary(graph, median_durations(graph, model), VARIATION)
    fused = fuse(graph)
    if fused is None:
        raise GraphError(f"{layout.name} has no lockstep sets")
    distributions = fuse_distributions(fused, whole)
    return ScaleJob(
        whole=whole,
        fused=fused,
        distributions=distributions,
        prepared_s=time.perf_counter() - began,
    )


def measure(dp: int, draws: int, workers: int, steps: int) -> list[Row]:
    """Time the draws of one world size."""
    job = prepare(Layout(tp=8, pp=16, dp=dp, microbatches=64))
    config = MonteCarlo(draws=draws, steps=steps)
    began = time.perf_counter()
    executor = LocalProcesses(workers=workers)
    drawn = draw_steps(job.fused.graph, job.distributions, config, executor=executor).step_ns_D
    took_s = time.perf_counter() - began
    origin = job.fused.origin
    name = f"{origin.world_size:,} ranks"
    covered = origin.n_rank_nodes * steps * draws
    drawn_nodes = job.fused.graph.n_rank_nodes * steps * draws
    p50, p95 = np.quantile(drawn, [0.5, 0.95]) / 1e9
    whole_s = job.prepared_s + took_s
    total = f"{name}: {draws:,} draws, all in, on {workers} cores"
    return [
        Row.at_most(total, whole_s, 120.0, "s") if dp == BARRED else Row.told(total, whole_s, "s"),
        Row.told(f"{name}: graph, distributions and fusing", job.prepared_s, "s"),
        Row.told(f"{name}: rank-nodes stood for, a second", covered / took_s / 1e6, "M"),
        Row.told(f"{name}: rank-nodes for each one that is drawn", covered / drawn_nodes),
        Row.told(f"{name}: step p50", p50, "s"),
        Row.told(f"{name}: step p95", p95, "s"),
    ]


def check_small(draws: int) -> list[Row]:
    """Compare fused and whole graph on a small job, and parallel groups drawn once and apart."""
    job = prepare(Layout(tp=8, pp=4, dp=2, microbatches=4))
    config = MonteCarlo(draws=draws, steps=1)
    origin = job.fused.origin
    together = replace(job.whole, once_G=job.fused.fused_group)
    whole, apart, fused = (
        draw_steps(graph, distributions, config).step_ns_D.astype(np.float64)
        for graph, distributions in (
            (origin, together),
            (origin, job.whole),
            (job.fused.graph, job.distributions),
        )
    )
    critical = float(REJECTED_AT_1_PERCENT * np.sqrt(2 / draws))
    name = f"64 ranks, {draws:,} draws: fused against whole graph"
    off = (np.median(fused) / np.median(apart) - 1) * 100
    return [
        Row.at_most(f"{name}, KS", ks_two_sample(whole, fused), critical),
        Row.told(f"{name} with parallel groups drawn apart, median", float(off), "%"),
    ]


def peak_rss_gb() -> float:
    """Return this process's peak memory plus twice that of its largest ended worker, in GB."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    largest_child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return (own + 2 * largest_child) * 1024 / 1e9
