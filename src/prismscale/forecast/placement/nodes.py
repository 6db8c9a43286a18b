"""Machines of unequal speed."""

from __future__ import annotations

import csv
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prismscale.durations.samples import StepSamples
from prismscale.errors import FormatError, UsageError
from prismscale.forecast.distributions.pools import rank_factors


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """A machine and how slow it is."""

    name: str
    factor: float
    """Of its computation time: 1.1 is 10 % slower than nominal."""


def read_nodes(path: Path) -> tuple[ClusterNode, ...]:
    """Nodes from a CSV with columns ``node`` and ``factor``, or ``speed`` (its inverse), or
    ``seconds`` (of the same work: a health check; the median node has factor 1).

    Raises:
        FormatError: other columns, a factor that is no positive number, a name that repeats.
        UsageError: the file cannot be read.
    """
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read '{path}': {error}") from error
    nodes = []
    for line, row in enumerate(rows, start=2):
        try:
            factor, name = _factor(row), row["node"]
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise FormatError(
                f"{path}, line {line}: expected columns node and factor (or speed, or seconds), "
                "both filled"
            ) from error
        if not 0 < factor < math.inf:
            raise FormatError(f"{path}, line {line}: factor {factor} must be positive")
        nodes.append(ClusterNode(name=name, factor=factor))
    repeated = [name for name, n in Counter(n.name for n in nodes).items() if n > 1]
    if not nodes or repeated:
        raise FormatError(f"{path}: {len(nodes)} nodes; named twice: {', '.join(repeated) or '-'}")
    if "seconds" not in rows[0]:
        return tuple(nodes)
    middle = statistics.median(n.factor for n in nodes)
    return tuple(ClusterNode(name=n.name, factor=n.factor / middle) for n in nodes)


def nodes_of_recording(
    samples: StepSamples, node_slots: Sequence[Sequence[int]]
) -> tuple[ClusterNode, ...]:
    """The node of each node slot, as slow as its ranks' computation was beside that of their peers.

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
