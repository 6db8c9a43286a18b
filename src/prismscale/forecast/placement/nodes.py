"""Nodes of unequal speed: from a list, a health check, a log, a recording, or a profile."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prismscale.cost.variability import VariabilityProfile
from prismscale.durations.samples import StepSamples
from prismscale.errors import FormatError, UsageError
from prismscale.forecast.distributions.pools import rank_factors
from prismscale.forecast.modelled.device_speeds import slowness
from prismscale.foreign import reading
from prismscale.typed_files import text_of

LONGEST_LINE = 2_000
"""Characters of a log line that are searched: the search takes time by their square."""
_SNIFF_TEST = "GPU sniff test"
_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_METRIC = re.compile(rf"(?P<name>\S[^\[\]]*) \[[^\]]+\]: median=(?P<median>{_NUMBER}), mean=")
_OUTLIER = re.compile(
    rf"OUTLIER rank (?P<rank>\d{{1,7}})(?: \((?P<node>[^)]*)\))?: (?P<value>{_NUMBER}) "
)


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """A node of the cluster and how slow it is."""

    name: str
    factor: float
    """Factor on its computation time: 1.1 is 10 % slower than nominal."""


def read_nodes(path: Path) -> tuple[ClusterNode, ...]:
    """Read nodes from a CSV file.

    Its columns are ``node``, and ``factor``, ``speed`` (its inverse) or ``seconds``. Seconds are
    times of the same work (a health check), and the median node gets factor 1.

    Raises:
        FormatError: other columns, a factor that is not a positive number, or a name that repeats.
        UsageError: the file cannot be read.
    """
    try:
        with reading(path, "a CSV of nodes"):
            rows = list(csv.DictReader(text_of(path).splitlines()))
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error}") from error
    nodes: list[ClusterNode] = []
    for line, row in enumerate(rows, start=2):
        try:
            factor, name = _factor(row), row["node"]
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise FormatError(
                f"{path}, line {line}: expected columns node and factor (or speed, or seconds), "
                "both filled"
            ) from error
        if not 0 < factor < math.inf:
            raise FormatError(f"{path}, line {line}: factor {factor} must be positive")
        if not isinstance(name, str):
            raise FormatError(f"{path}, line {line}: a node without a name")
        nodes.append(ClusterNode(name=name, factor=factor))
    repeated = [name for name, n in Counter(n.name for n in nodes).items() if n > 1]
    if not nodes or repeated:
        raise FormatError(f"{path}: {len(nodes)} nodes; named twice: {', '.join(repeated) or '-'}")
    if "factor" in rows[0] or "seconds" not in rows[0]:
        return tuple(nodes)
    middle = statistics.median(n.factor for n in nodes)
    return tuple(ClusterNode(name=n.name, factor=n.factor / middle) for n in nodes)


def read_sniff_test(path: Path, world_size: int, per_node: int) -> tuple[ClusterNode, ...] | None:
    """Read nodes from a log of Megatron-LM's GPU sniff test (``--gpu-sniff-test-interval``).

    The test times matrix products on every rank, and logs the ranks that are more than 10 % off the
    median; all others count as median. Of several tests the last one counts. A node is as slow as
    its slowest device, each device on average over the products.

    Returns:
        The nodes, or None where the log holds no such test.

    Raises:
        UsageError: the file cannot be read.
        FormatError: the log names a rank that the job does not have.
    """
    try:
        lines = [line[:LONGEST_LINE] for line in text_of(path, errors="replace").splitlines()]
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error}") from error
    starts = [i for i, line in enumerate(lines) if _SNIFF_TEST in line]
    if not starts:
        return None
    factors, names, median = [np.ones(world_size)], {}, 0.0
    for number, line in enumerate(lines[starts[-1] :], start=starts[-1] + 1):
        if found := _METRIC.search(line):
            # Bandwidths of groups say nothing about one device.
            median = float(found["median"]) if "GEMM throughput" in found["name"] else 0.0
            factors += [np.ones(world_size)] if median else []
        elif (found := _OUTLIER.search(line)) and median:
            rank, value = int(found["rank"]), float(found["value"])
            if rank >= world_size or value <= 0:
                raise FormatError(
                    f"{path}, line {number}: rank {rank} at {value:g} in a job of {world_size} "
                    "ranks; give the log of a test on as many"
                )
            factors[-1][rank] = median / value
            names[rank // per_node] = found["node"] or ""
    mean_R = np.mean(factors[1:] or factors, axis=0)
    return tuple(
        ClusterNode(
            name=names.get(n) or f"node of rank {n * per_node}",
            factor=float(mean_R[n * per_node : (n + 1) * per_node].max()),
        )
        for n in range(-(-world_size // per_node))
    )


def nodes_of_profile(
    profile: VariabilityProfile, count: int, per_node: int, *, seed: int = 0
) -> tuple[ClusterNode, ...]:
    """Draw nodes from a variability profile.

    Each node is as slow as its slowest device is at matrix products.

    Raises:
        UsageError: the profile's devices are all alike.
    """
    cv = profile.kernel("gemm").spatial_cv
    if not cv:
        raise UsageError(f"devices of the profile '{profile.name}' do not differ (spatial_cv)")
    rng = np.random.default_rng(seed)
    node_R = np.repeat(np.arange(count), per_node)
    slowest_N = slowness(rng, 1, node_R, profile.node_share)[0].reshape(count, per_node).max(axis=1)
    return tuple(
        ClusterNode(name=f"drawn node {n}", factor=round(float(1 + cv * z), 6))
        for n, z in enumerate(slowest_N.tolist())
    )


def nodes_of_recording(
    samples: StepSamples, node_slots: Sequence[Sequence[int]]
) -> tuple[ClusterNode, ...]:
    """Return the node of each node slot, as slow as its ranks' computation was in the recording.

    A rank is compared with its peers, see :func:`rank_factors`.

    Raises:
        UsageError: all ranks are equally fast, or share one recording.
    """
    factor_R = rank_factors(samples)
    found = [float(np.mean(factor_R[list(node_slot)])) for node_slot in node_slots]
    if np.ptp(found) == 0:
        raise UsageError(
            "the recording shows no difference between nodes (ranks of a stage share one capture, "
            "or have no peers); give their speeds as a CSV"
        )
    return tuple(
        ClusterNode(name=f"node of rank {node_slot[0]}", factor=factor)
        for node_slot, factor in zip(node_slots, found, strict=True)
    )


def _factor(row: Mapping[str, str]) -> float:
    if "factor" in row:
        return float(row["factor"])
    return float(row["seconds"]) if "seconds" in row else 1 / float(row["speed"])
