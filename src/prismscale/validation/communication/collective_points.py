"""Public measurements of NCCL's collectives, and which of them no constant was fitted to.

There are two harnesses: nccl-tests (launches in a row on a stream) and aiconfigurator (launches
inside a CUDA graph). On one node they agree at all sizes, so both give times of the kernel.

[Note: held out] Constants are fitted (``tools/fit/fit_collectives.py``) to groups of 2 and of 8
GPUs of one node, to node pairs, and to 10 nodes with 1, 2 and 4 GPUs each. Held out and scored:

- groups of 4 and 6 GPUs of one node, whatever the GPU, harness or version of NCCL;
- measurements of other laboratories: all rows of dgxc-benchmarking and nccl-collectives-bench;
- other versions of NCCL (2.23, 2.29.2) in aiconfigurator;
- all rows of 80 GPUs;
- A100s on other networks (AWS p4de, OCI).
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from prismscale.cluster import Cluster, Link
from prismscale.cost.topology import TopologyFootprint
from prismscale.errors import FormatError
from prismscale.graph.node import CollectiveOp

OPS: Mapping[str, CollectiveOp] = {
    "all_reduce": CollectiveOp.ALL_REDUCE,
    "all_gather": CollectiveOp.ALL_GATHER,
    "reduce_scatter": CollectiveOp.REDUCE_SCATTER,
    "alltoall": CollectiveOp.ALL_TO_ALL,
    "sendrecv": CollectiveOp.SEND,
}
NCCL_TESTS = Path("nccl") / "nccl_tests.csv.gz"
AICONFIGURATOR = "aiconfigurator"
FITTED_VERSION = "2.27.3"
FITTED_GROUPS = (2, 8)
LARGEST_FITTED = 40
_FITTED_LABORATORY = "xxrjun/nccl-tests-cluster"
_LEFT_OUT = ("algo_sweep", "proto_sweep", "symmetric", "pairwise|example-cluster00")
"""Prefixes of configurations that are left out: forced algorithms and protocols, registered
buffers, and a cluster with defective links."""
_ELEMENT_BYTES = {"half": 2, "int8": 1}
_GPUS = {"a100_sxm": "a100", "h100_sxm": "h100", "b200_sxm": "b200"}


@dataclass(frozen=True, kw_only=True)
class CollectivePoint:
    """One measured point: the median over its repetitions."""

    hardware: str
    """Key of :func:`clusters`."""
    source: str
    """Repository of the measurement, and for aiconfigurator the version of NCCL."""
    op: CollectiveOp
    n_ranks: int
    nodes: int
    n_bytes: int
    """Size in the convention of :class:`~prismscale.graph.node.CollectiveOp`."""
    time_ns: float

    @property
    def is_fitted(self) -> bool:
        """Whether a constant was fitted to the point; see [Note: held out]."""
        if self.hardware == "h100 p5":
            return True
        if self.source.startswith(AICONFIGURATOR):
            return self.source.endswith(FITTED_VERSION) and self.n_ranks in FITTED_GROUPS
        if self.source != _FITTED_LABORATORY or self.hardware != "h100":
            return False
        return self.n_ranks <= LARGEST_FITTED if self.nodes > 1 else self.n_ranks in FITTED_GROUPS

    @property
    def footprint(self) -> TopologyFootprint:
        """Footprint of the group, which is spread evenly over its nodes."""
        return even_footprint(self.n_ranks, self.nodes)


def even_footprint(n_ranks: int, nodes: int) -> TopologyFootprint:
    """Return the footprint of a group with as many members on each node."""
    each = n_ranks // nodes
    return TopologyFootprint(size=n_ranks, nodes=nodes, most=each, least=each)


def clusters() -> Mapping[str, Cluster]:
    """Return the presets, and the same nodes on the networks with which some rows were measured."""
    h100, a100 = Cluster.load("h100-sxm"), Cluster.load("a100-80g")
    efa = replace(h100.inter_node, latency_ns=35_820, bandwidth_bytes_per_s=12.5e9)
    roce = Link(latency_ns=a100.inter_node.latency_ns, bandwidth_bytes_per_s=12.5e9)
    return {
        "h100": h100,
        "a100": a100,
        "b200": Cluster.load("b200"),
        "h100 p5": replace(h100, name="p5", nics_per_node=32, inter_node=efa),
        "a100 oci": replace(a100, name="oci", nics_per_node=16, inter_node=roce),
        "a100 p4de": replace(a100, name="p4de", nics_per_node=4, inter_node=roce),
    }


def load_points(truth: Path) -> list[CollectivePoint]:
    """Load all measured points below ``truth``, the folder of public measurements.

    Raises:
        FormatError: a file is missing or damaged.
    """
    folder = truth / AICONFIGURATOR
    files = sorted(folder.glob("*__nccl_perf__*.csv.gz"))
    if not files:
        raise FormatError(f"no *__nccl_perf__*.csv.gz in {folder}; give the folder of public truth")
    times: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    try:
        for key, time_ns in _nccl_tests(truth / NCCL_TESTS):
            times[key].append(time_ns)
        for path in files:
            for key, time_ns in _aiconfigurator(path):
                times[key].append(time_ns)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, KeyError, ValueError) as error:
        raise FormatError(f"measurements of collectives below {truth}: {error!r}") from error
    return [
        CollectivePoint(
            hardware=hardware,
            source=source,
            op=op,
            n_ranks=n,
            nodes=nodes,
            n_bytes=n_bytes,
            time_ns=median(found),
        )
        for (hardware, source, _, op, n, nodes, n_bytes), found in times.items()
    ]


_Measured = tuple[tuple[Any, ...], float]


def _nccl_tests(path: Path) -> Iterator[_Measured]:
    with gzip.open(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            n_bytes = int(row["size_bytes"])
            if n_bytes == 0 or row["config"].startswith(_LEFT_OUT):
                continue
            kind = row["config"].split("|")[0]
            placed = (int(row["gpus"]), int(row["nodes"] or 1), n_bytes)
            op = OPS[row["collective"]]
            yield (_hardware(row), row["source"], kind, op, *placed), 1e3 * float(row["time_us"])


def _aiconfigurator(path: Path) -> Iterator[_Measured]:
    gpu, _, version = path.name.removesuffix(".csv.gz").split("__")
    source = f"{AICONFIGURATOR} {version}"
    with gzip.open(path, "rt", newline="") as file:
        for row in csv.DictReader(file):
            # Sizes in these tables are numbers of elements.
            n_bytes = int(row["message_size"]) * _ELEMENT_BYTES[row["nccl_dtype"]]
            key = (_GPUS[gpu], source, "", OPS[row["op_name"]], int(row["num_gpus"]), 1, n_bytes)
            yield key, 1e6 * float(row["latency_ms"])


def _hardware(row: Mapping[str, str]) -> str:
    if "A100" in row["hardware"]:
        return "a100 p4de" if "p4de" in row["hardware"] else "a100 oci"
    return "h100 p5" if "p5" in row["hardware"] else "h100"
