"""How fast the engine re-times a job, on one core.

Run ``python bench/engine.py [--json PATH]`` on an otherwise idle machine: times are wall clock. The
job is the synthetic 1F1B step of ``tests/support/jobs.py``: TP 8 × PP 16 × DP 64 (8,192 ranks) and
DP 512 (65,536 ranks), 64 microbatches. A rank-node is one node of one rank in one step: what a flat
simulator would have to touch. With one duration per class the engine never expands a class to its
members, so that rate counts ranks answered for; with a duration per member it touches each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import tests_on_path  # noqa: F401
from prismscale.durations.source import Duration, DurationSource
from prismscale.graph.io import GRAPH_FILE, load_graph, save_graph
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import NodeKind
from prismscale.graph.verify import verify
from prismscale.sim.program import compile_job
from prismscale.sim.timeline import simulate
from prismscale.validation.rows import Row, finish
from support.jobs import RecordedDurations, job_from_traces, pipeline_traces

STEPS = 3


class PerMember(RecordedDurations):
    """Every member of a class computes with durations of its own, ±10 %."""

    def __init__(self, graph: JobGraph) -> None:
        super().__init__(graph)
        rng = np.random.default_rng(0)
        for rank_class, rows in zip(graph.classes, self._body, strict=True):
            kinds = rank_class.trace.kind_N[rank_class.trace.n_prologue :].tolist()
            for row in rows:
                row[:] = [
                    _spread(rng, ns, rank_class.size) if kind == NodeKind.COMPUTE else ns
                    for ns, kind in zip(row, kinds, strict=True)
                ]


def _spread(rng: np.random.Generator, ns: int, size: int) -> Duration:
    return ns * rng.integers(90, 111, size) // 100


def measure(dp: int, label: str) -> list[Row]:
    """All figures of one job size."""
    built_s, graph = timed(lambda: job_from_traces(pipeline_traces(16, dp, 8, 64)))
    verified_s, _ = timed(lambda: verify(graph))
    compiled_s, program = timed(lambda: compile_job(graph))
    n_stored = sum(c.trace.n_nodes for c in graph.classes)
    print(
        f"{label}: {len(graph.classes)} classes, {n_stored:,} stored nodes, "
        f"{graph.n_rank_nodes:,} rank-nodes a step"
    )
    rows = [Row.told(f"{label}: build to compiled", built_s + verified_s + compiled_s, "s")]
    sources: list[tuple[str, DurationSource]] = [
        ("one duration per class", RecordedDurations(graph)),
        ("a duration per member", PerMember(graph)),
    ]
    for name, source in sources:
        job = partial(simulate, graph, source, steps=STEPS, program=program)
        seconds = min(timed(job)[0] for _ in range(3))
        rate = graph.n_rank_nodes * STEPS / seconds / 1e6
        rows.append(Row.at_least(f"{label}, {name}", rate, 30, "M rank-nodes/s"))
        rows.append(Row.at_most(f"{label}, {name}: one step", seconds / STEPS, 60, "s"))
    return rows + stored(graph, label)


def stored(graph: JobGraph, label: str) -> list[Row]:
    """Time and size of the graph on disk."""
    with tempfile.TemporaryDirectory() as folder:
        save_s, _ = timed(lambda: save_graph(graph, Path(folder)))
        load_s, _ = timed(lambda: load_graph(Path(folder)))
        megabytes = (Path(folder) / GRAPH_FILE).stat().st_size / 1e6
    return [
        Row.at_most(f"{label}: save graph", save_s, 2, "s"),
        Row.at_most(f"{label}: load graph", load_s, 2, "s"),
        Row.at_most(f"{label}: graph file", megabytes, 50, "MB"),
    ]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Wall seconds of ``work``, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main() -> int:
    """Measure, print, and fail where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    rows = [*measure(64, "8,192 ranks"), *measure(512, "65,536 ranks")]
    return finish(rows, json_path=options.json)


if __name__ == "__main__":
    sys.exit(main())
