"""Accuracy of the collective model on public nccl-tests rows, and the cost of a query.

    python bench/collectives.py [--truth DIR] [--json PATH] [--page docs/accuracy.md]

``DIR`` holds ``nccl/nccl_tests.csv.gz``. Rows of 80 GPUs were held out when the presets were
fitted; other H100 rows were used. Repeated measurements of one point (several node pairs) count
once, by their median. Left out are rows of forced algorithms and protocols, and of a cluster with
defective links (example-cluster00).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from error_summary import summarize_errors
from prismscale.cluster import Cluster, Link
from prismscale.cost.collective import AnalyticCollectiveModel
from prismscale.cost.topology import TopologyFootprint
from prismscale.graph.node import CollectiveOp
from prismscale.validation.accuracy_page import renew, section
from prismscale.validation.rows import Row, finish

DEFAULT_TRUTH = Path(__file__).resolve().parents[1] / ".." / "shared" / "truth"
MIB = 2**20
HELD_OUT_GPUS = 80
OPS = {
    "all_reduce": CollectiveOp.ALL_REDUCE,
    "all_gather": CollectiveOp.ALL_GATHER,
    "reduce_scatter": CollectiveOp.REDUCE_SCATTER,
    "alltoall": CollectiveOp.ALL_TO_ALL,
    "sendrecv": CollectiveOp.SEND,
}
LEFT_OUT = ("algo_sweep", "proto_sweep", "symmetric", "pairwise|example-cluster00")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured point: the median over its repetitions."""

    hardware: str
    op: CollectiveOp
    n_ranks: int
    nodes: int
    n_bytes: int
    time_ns: float

    @property
    def held_out(self) -> bool:
        """Not seen when the presets were fitted."""
        return self.hardware == "h100" and self.n_ranks == HELD_OUT_GPUS

    @property
    def is_p2p(self) -> bool:
        """A send and receive rather than a collective."""
        return self.op.is_p2p


REMARKS = (
    "Errors are of the time after the last arrival, over public rows of nccl-tests, each point "
    "once. "
    "Rows of 80 GPUs were held out when h100-sxm was fitted; its other rows are marked fitted. No "
    "figure has several groups that share links, as jobs do.",
)


def main() -> int:
    """Print the table; exit code 1 where a bar is missed, 2 where there is no truth."""
    options = _options()
    path = options.truth / "nccl" / "nccl_tests.csv.gz"
    if not path.is_file():
        print(f"no public truth at {path}: give its folder with --truth DIR", file=sys.stderr)
        return 2
    rows = [*_accuracy_rows(load_points(path)), *_query_rows()]
    code = finish(rows, title="Collective model", json_path=options.json)
    if options.page is not None:
        name, command = "Communication", "python bench/collectives.py"
        renew(options.page, name, section(name, rows, command=command, remarks=REMARKS))
    return code


def load_points(path: Path) -> list[Point]:
    """Measured points of ``nccl_tests.csv.gz``."""
    times: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    with gzip.open(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            n_bytes = int(row["size_bytes"])
            if n_bytes == 0 or row["config"].startswith(LEFT_OUT):
                continue
            source = (row["source"], row["config"].split("|")[0])
            placed = (int(row["gpus"]), int(row["nodes"] or 1))
            key = (_hardware(row), *source, row["collective"], *placed, n_bytes)
            times[key].append(float(row["time_us"]) * 1e3)
    return [
        Point(
            hardware=hardware, op=OPS[op], n_ranks=n, nodes=nodes, n_bytes=size, time_ns=median(t)
        )
        for (hardware, _, _, op, n, nodes, size), t in times.items()
    ]


def clusters() -> Mapping[str, Cluster]:
    """The presets, and the same nodes on the networks that some rows were measured with."""
    h100, a100 = Cluster.load("h100-sxm"), Cluster.load("a100-80g")
    efa = replace(h100.inter_node, latency_ns=35_820, bandwidth_bytes_per_s=12.5e9)
    roce = Link(latency_ns=a100.inter_node.latency_ns, bandwidth_bytes_per_s=12.5e9)
    return {
        "h100": h100,
        "h100 p5": replace(h100, name="p5", nics_per_node=32, inter_node=efa),
        "a100 oci": replace(a100, name="oci", nics_per_node=16, inter_node=roce),
        "a100 p4de": replace(a100, name="p4de", nics_per_node=4, inter_node=roce),
    }


def _hardware(row: Mapping[str, str]) -> str:
    if "A100" in row["hardware"]:
        return "a100 p4de" if "p4de" in row["hardware"] else "a100 oci"
    return "h100 p5" if "p5" in row["hardware"] else "h100"


def _accuracy_rows(points: Iterable[Point]) -> list[Row]:
    models = {name: AnalyticCollectiveModel(cluster) for name, cluster in clusters().items()}
    groups: list[tuple[str, Callable[[Point], bool], float | None, float | None]] = [
        (
            "held out: 80 H100, >= 512 MiB",
            lambda p: p.held_out and p.n_bytes >= 512 * MIB and not p.is_p2p,
            4.8,
            10.3,
        ),
        (
            "held out: 80 H100, < 512 MiB",
            lambda p: p.held_out and p.n_bytes < 512 * MIB and not p.is_p2p,
            None,
            None,
        ),
        (
            "held out: 80 H100, sendrecv (collapsed link)",
            lambda p: p.held_out and p.is_p2p,
            None,
            None,
        ),
        (
            "fitted: one H100 node, < 64 MiB",
            lambda p: _fitted_h100(p) and p.nodes == 1 and p.n_bytes < 64 * MIB,
            None,
            None,
        ),
        (
            "fitted: one H100 node, >= 64 MiB",
            lambda p: _fitted_h100(p) and p.nodes == 1 and p.n_bytes >= 64 * MIB,
            None,
            None,
        ),
        (
            "fitted: 2-40 H100 on several nodes",
            lambda p: _fitted_h100(p) and p.nodes > 1,
            None,
            None,
        ),
        ("fitted: 16 H100, p5 (EFA)", lambda p: p.hardware == "h100 p5", None, None),
        (
            "sendrecv, one H100 node, < 256 MiB",
            lambda p: p.is_p2p and p.nodes == 1 and p.n_bytes < 256 * MIB,
            None,
            None,
        ),
        (
            "sendrecv, one H100 node, >= 256 MiB",
            lambda p: p.is_p2p and p.nodes == 1 and p.n_bytes >= 256 * MIB,
            None,
            None,
        ),
        ("sendrecv, node pairs", lambda p: p.is_p2p and p.nodes == 2, None, None),
        ("unseen: 16 A100, OCI", lambda p: p.hardware == "a100 oci", None, None),
        (
            "unseen: 16 A100, p4de (EFA), >= 512 MiB",
            lambda p: p.hardware == "a100 p4de" and p.n_bytes >= 512 * MIB,
            None,
            None,
        ),
    ]
    known = list(points)
    rows = []
    for name, belongs, median_bar, p90_bar in groups:
        chosen = [p for p in known if belongs(p)]
        predicted = [_predict(models[p.hardware], p) for p in chosen]
        errors = summarize_errors(predicted, [p.time_ns for p in chosen])
        label = f"{name} ({errors.count} points)"
        rows.append(_row(f"{label}: median error", 100 * errors.median, "%", median_bar))
        rows.append(_row(f"{label}: p90 error", 100 * errors.p90, "%", p90_bar))
    return rows


def _fitted_h100(point: Point) -> bool:
    return point.hardware == "h100" and not point.held_out and not point.is_p2p


def _predict(model: AnalyticCollectiveModel, point: Point) -> float:
    per_node = point.n_ranks // point.nodes
    at = TopologyFootprint(size=point.n_ranks, nodes=point.nodes, most=per_node, least=per_node)
    return float(model.time_ns(point.op, point.n_bytes, at))


def _query_rows(n_queries: int = 20_000) -> list[Row]:
    """Time of a repeated query for 1,024 groups of 8 ranks, laid across nodes."""
    model = AnalyticCollectiveModel(Cluster.load("h100-sxm"))
    ranks_KG = np.arange(8192).reshape(8, 1024)
    model.duration_ns(CollectiveOp.ALL_REDUCE, MIB, ranks_KG)
    began = time.perf_counter()
    for _ in range(n_queries):
        model.duration_ns(CollectiveOp.ALL_REDUCE, MIB, ranks_KG)
    each_us = 1e6 * (time.perf_counter() - began) / n_queries
    return [Row.at_most("cached query, 1,024 groups of 8", each_us, 20.0, "us")]


def _row(name: str, value: float, unit: str, bar: float | None) -> Row:
    if bar is None:
        return Row.told(name, value, unit)
    return Row.at_most(name, value, bar, unit)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--truth", type=Path, default=DEFAULT_TRUTH)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--page", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
