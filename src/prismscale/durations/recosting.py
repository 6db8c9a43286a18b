"""A null run's computation with other costs, without a new capture.

Each captured rank left a log of its launches beside its trace. What a class takes is made of the
logs of its captured members as it was made of their traces: the longest of each node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.cluster import Cluster
from prismscale.cost.kernel_measured import KernelCostSource
from prismscale.cost.launch_log import LaunchLog, costs, load_launch_log, recost
from prismscale.errors import UsageError
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.trace import RankTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSettings:
    """What a null run's kernels cost."""

    gpu: str
    """Name of the GPU, as a cluster gives it."""
    kernels: str = ""
    """File of measured kernel times that go before the model's; empty for none."""
    fused: bool = False
    """Elementwise work is costed as torch.compile fuses it."""


def launches_path(captures: Path, rank: int) -> Path:
    """Where the log of a captured rank's launches lies."""
    return captures / f"launches-{rank}.parquet"


def recosted_graph(graph: JobGraph, captures: Path, asked: CostSettings) -> JobGraph:
    """``graph`` with its computation at these costs.

    Args:
        graph: of a null run.
        captures: folder of the traces that it was made of.
        asked: the costs.

    Raises:
        UsageError: a GPU that is not known, or logs that are not there.
        FormatError: damaged files.
    """
    model = KernelCostSource(table=asked.kernels, fused=asked.fused).model(gpu_key(asked.gpu))
    known: dict[int, RankTrace] = {}
    classes = []
    for rank_class in graph.classes:
        trace = rank_class.trace
        # Classes that share a trace go on sharing it.
        if id(trace) not in known:
            rows = [_body_ns(log, trace, *costs(log, model)) for log in _logs(trace, captures)]
            longest_B = np.max(rows, axis=0)
            known[id(trace)] = replace(trace, body_ns_SB=longest_B[np.newaxis])
        classes.append(replace(rank_class, trace=known[id(trace)]))
    return replace(graph, classes=tuple(classes))


def gpu_key(name: str) -> str:
    """The name of the kernel model of the GPU that a cluster calls ``name``.

    Raises:
        UsageError: there is none.
    """
    devices = {Cluster.load(preset).device.name: preset for preset in Cluster.presets()}
    if name not in devices:
        raise UsageError(f"no kernel model knows {name!r}; allowed: {', '.join(devices)}")
    return devices[name]


def _logs(trace: RankTrace, captures: Path) -> Iterator[LaunchLog]:
    """Of the captured ranks that a class's durations were made of."""
    for rank in dict.fromkeys(trace.facts.longest_of or (trace.rank,)):
        path = launches_path(captures, rank)
        if not path.is_file():
            raise UsageError(
                f"{path} is missing, without which other costs need another capture: run the "
                "program again with what is to change"
            )
        yield load_launch_log(path)


def _body_ns(
    log: LaunchLog, trace: RankTrace, device_ns_S: NDArray[np.int64], host_ns_S: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Durations of the body; the log counts nodes from its beginning."""
    if len(log.node_N) and int(log.node_N[-1]) >= trace.n_body:
        raise UsageError(
            f"rank {trace.rank}: the log of launches is of another trace; run the program again "
            "with --fresh"
        )
    body_ns_B = trace.body_ns_SB[0].copy()
    body_ns_B[log.node_N] = recost(log, device_ns_S, host_ns_S)
    return body_ns_B
