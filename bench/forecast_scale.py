"""What a forecast costs: draws of a job of 8,192 ranks, and the curve to 65,536.

The job is TP 8 × PP 16 × DP, 1F1B with 64 microbatches, 16 tensor-parallel collectives in each
pass: 35.5 million rank-nodes a step at 8,192 ranks. Draws run on the fused graph (see
``prismscale.forecast.lockstep``); that it has the law of the whole one is tested in
``tests/test_montecarlo.py``, and checked here once more on a small job.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from prismscale.analysis.rows import Row, print_rows, write_rows
from prismscale.cluster import Cluster
from prismscale.cost.collective import AnalyticCollectiveModel
from prismscale.forecast.executor import LocalProcesses
from prismscale.forecast.goodness import ks_two_sample
from prismscale.forecast.layout import Layout, PassCosts, build_layout, median_durations
from prismscale.forecast.lockstep import FusedGraph, fuse
from prismscale.forecast.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.sampling import LawDraws, fuse_laws
from prismscale.forecast.variation import Variation, vary

COSTS = PassCosts(
    forward_ns=10**7,
    input_gradient_ns=10**7,
    weight_gradient_ns=10**7,
    optimizer_ns=2 * 10**7,
    tp_collectives=16,
    tp_bytes=2**25,
    boundary_bytes=2**25,
    gradient_bytes=2**30,
)
VARIATION = Variation(compute_cv=0.03, communication_cv=0.1, stall_probability=1e-5)
CURVE = {8: 1_024, 64: 8_192, 128: 16_384, 256: 32_768, 512: 65_536}
"""World size by data-parallel width."""


@dataclass(frozen=True, kw_only=True)
class Job:
    whole: LawDraws
    fused: FusedGraph
    laws: LawDraws
    prepared_s: float


def prepare(layout: Layout) -> Job:
    began = time.perf_counter()
    graph = build_layout(layout, COSTS)
    model = AnalyticCollectiveModel(Cluster.load("h100-sxm"))
    whole = vary(graph, median_durations(graph, model), VARIATION)
    fused = fuse(graph)
    if fused is None:
        raise RuntimeError("the bench's job has lockstep sets")
    laws = fuse_laws(fused, whole)
    return Job(whole=whole, fused=fused, laws=laws, prepared_s=time.perf_counter() - began)


def measure(dp: int, draws: int, workers: int, steps: int) -> list[Row]:
    job = prepare(Layout(tp=8, pp=16, dp=dp, microbatches=64))
    config = MonteCarlo(draws=draws, steps=steps)
    began = time.perf_counter()
    executor = LocalProcesses(workers=workers)
    drawn = draw_steps(job.fused.graph, job.laws, config, executor=executor).step_ns_D
    took_s = time.perf_counter() - began
    origin = job.fused.origin
    name = f"{origin.world_size:,} ranks"
    covered = origin.n_rank_nodes * steps * draws
    p50, p95 = np.quantile(drawn, [0.5, 0.95]) / 1e9
    whole_s = job.prepared_s + took_s
    total = f"{name}: {draws:,} draws, all in, on {workers} cores"
    bar = dp == 64
    return [
        Row.at_most(total, whole_s, 120.0, "s") if bar else Row.told(total, whole_s, "s"),
        Row.told(f"{name}: graph, laws and fusing", job.prepared_s, "s"),
        Row.told(f"{name}: rank-nodes stood for, a second", covered / took_s / 1e6, "M"),
        Row.told(f"{name}: rank-nodes for each one that is drawn", covered / _drawn(job, config)),
        Row.told(f"{name}: step p50", p50, "s"),
        Row.told(f"{name}: step p95", p95, "s"),
    ]


def _drawn(job: Job, config: MonteCarlo) -> int:
    return job.fused.graph.n_rank_nodes * config.steps * config.draws


def check_small(draws: int) -> list[Row]:
    """Fused against whole graph on a small job; what drawing parallel groups once is worth."""
    job = prepare(Layout(tp=8, pp=4, dp=2, microbatches=4))
    config = MonteCarlo(draws=draws, steps=1)
    origin = job.fused.origin
    together = replace(job.whole, once_G=job.fused.fused_group)
    whole = draw_steps(origin, together, config).step_ns_D
    apart = draw_steps(origin, job.whole, config).step_ns_D
    fused = draw_steps(job.fused.graph, job.laws, config).step_ns_D
    critical = float(1.63 * np.sqrt(2 / draws))
    name = f"64 ranks, {draws:,} draws: fused against whole graph"
    off = (np.median(fused) / np.median(apart) - 1) * 100
    return [
        Row.at_most(f"{name}, KS", ks_two_sample(whole, fused), critical),
        Row.told(f"{name} with parallel groups drawn apart, median", float(off), "%"),
    ]


def peak_rss_gb() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    largest_child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return (own + 2 * largest_child) * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="simulated steps a draw")
    parser.add_argument("--most-ranks", type=int, default=65_536)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = check_small(2_000)
    for dp, ranks in CURVE.items():
        if ranks <= arguments.most_ranks:
            rows += measure(dp, arguments.draws, arguments.workers, arguments.steps)
            if dp == 64:
                name = "8,192 ranks: peak memory, this process and twice its largest worker"
                rows.append(Row.at_most(name, peak_rss_gb(), 8.0, "GB"))
    print_rows(rows, title="Cost of a forecast", console=Console(width=120))
    if arguments.json:
        write_rows(rows, arguments.json)


if __name__ == "__main__":
    main()
