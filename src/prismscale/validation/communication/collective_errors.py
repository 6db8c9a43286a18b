"""Compares the collective model with public measurements: ``prismscale validate collectives``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.collective import AnalyticCollectiveModel
from prismscale.graph.node import CollectiveOp
from prismscale.validation.communication.collective_points import (
    CollectivePoint,
    clusters,
    load_points,
)
from prismscale.validation.communication.exchange_errors import exchange_rows
from prismscale.validation.communication.overlap_errors import overlap_rows
from prismscale.validation.error_rows import Bars, error_rows
from prismscale.validation.rows import Row

MIB = 2**20
LARGE = 64 * MIB
VERY_LARGE = 512 * MIB
REMARKS = (
    "Errors are of the time after the last arrival, each measured point once. Held out: groups of "
    "4 and 6 GPUs of one node, other laboratories, other versions of NCCL, all rows of 80 GPUs, "
    "other networks; the constants are of groups of 2 and 8, of node pairs and of 10 nodes.",
    "An all_reduce of 4 H100 is shown and not scored: that in-switch reduction begins at 5 members "
    "was read off such rows.",
    "B200, 64 MiB and more: in the fitted rows, too, a reduce_scatter of two GPUs takes 1.14 times "
    "as long as an all_gather, and bandwidth still grows by a tenth from 128 to 512 MiB; the law "
    "has neither.",
    "80 GPUs below 512 MiB, and sends among 10 nodes, are slower on the measured cluster than any "
    "model of links explains (its 80-GPU sends reach 15 GB/s of 50).",
    "DeepEP and HybridEP: times of kernels alone, but for DeepEP's in HybridEP's README, which are "
    "of calls from torch. What the links take is that of an all_to_all, by NCCL's constants. "
    "DeepEP's kernels copy with as many multiprocessors as a program gives them: constants of 8 "
    "H100 with up to 12 of them.",
    "Kernels beside a collective are slower in runs with --what-if compute=shared alone. Its "
    "constants are of one H100, where a copy held the multiprocessors; published figures are few, "
    "of NCCL, and do not say how much of it is memory bandwidth.",
    "The rows have one group at a time. Groups of one family that share network cards are counted "
    "(docs/clusters.md); no public figure scores that.",
)


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Points that are scored together."""

    name: str
    belongs: Callable[[CollectivePoint], bool]
    median_bar: float | None = None
    """Upper bound of the median error, in percent."""


def validate(truth: Path) -> list[Row]:
    """Return all rows, held-out families first.

    Raises:
        FormatError: measurements are missing or damaged.
    """
    points = load_points(truth)
    models = {name: AnalyticCollectiveModel(cluster) for name, cluster in clusters().items()}
    held_out = [p for p in points if not p.is_fitted]
    fitted = [p for p in points if p.is_fitted]
    return [
        *_rows("held out", HELD_OUT, held_out, models),
        *exchange_rows(truth),
        *overlap_rows(),
        *_rows("fitted", FITTED, fitted, models),
    ]


def _rows(
    label: str,
    families: Sequence[_Family],
    points: Iterable[CollectivePoint],
    models: Mapping[str, AnalyticCollectiveModel],
) -> Iterator[Row]:
    points = list(points)
    for family in families:
        chosen = [p for p in points if family.belongs(p)]
        if chosen:
            bars = Bars(median=family.median_bar)
            name = f"{label}: {family.name}"
            yield from error_rows(name, 100 * _errors(chosen, models), bars, of="points")


def _errors(
    points: Sequence[CollectivePoint], models: Mapping[str, AnalyticCollectiveModel]
) -> NDArray[np.float64]:
    """Return relative errors, positive where the model is too slow."""
    predicted = [models[p.hardware].time_ns(p.op, p.n_bytes, p.footprint) for p in points]
    return np.array(predicted) / np.array([p.time_ns for p in points]) - 1.0


def _is_read_off(point: CollectivePoint) -> bool:
    """Whether the point gave the group size at which in-switch reduction begins."""
    is_sum = point.op == CollectiveOp.ALL_REDUCE and point.nodes == 1
    return is_sum and point.hardware == "h100" and point.n_ranks == 4


def _one_node(gpu: str, *, large: bool) -> Callable[[CollectivePoint], bool]:
    def belongs(point: CollectivePoint) -> bool:
        if point.hardware != gpu or point.nodes > 1 or point.op.is_p2p or _is_read_off(point):
            return False
        return (point.n_bytes >= LARGE) == large

    return belongs


def _largest(*, all_to_all: bool) -> Callable[[CollectivePoint], bool]:
    def belongs(point: CollectivePoint) -> bool:
        if point.n_ranks != 80 or point.n_bytes < VERY_LARGE or point.op.is_p2p:
            return False
        return (point.op == CollectiveOp.ALL_TO_ALL) == all_to_all

    return belongs


def _sends(*, nodes: tuple[int, ...], at_least: int = 0) -> Callable[[CollectivePoint], bool]:
    return lambda p: p.op.is_p2p and p.nodes in nodes and p.n_bytes >= at_least


def _on(hardware: str, at_least: int = 0) -> Callable[[CollectivePoint], bool]:
    return lambda p: p.hardware == hardware and p.n_bytes >= at_least


_ONE_NODE = [
    _Family(
        name=f"one node of {gpu.upper()}, {'≥' if large else '<'} 64 MiB",
        belongs=_one_node(gpu, large=large),
        median_bar=3.0 if large else 8.0,
    )
    for gpu in ("h100", "a100", "b200")
    for large in (True, False)
]
HELD_OUT = (
    *_ONE_NODE,
    _Family(
        name="80 H100, ≥ 512 MiB, all_reduce, all_gather, reduce_scatter",
        belongs=_largest(all_to_all=False),
        median_bar=4.0,
    ),
    _Family(
        name="80 H100, ≥ 512 MiB, all_to_all", belongs=_largest(all_to_all=True), median_bar=5.0
    ),
    _Family(
        name="80 H100, < 512 MiB",
        belongs=lambda p: p.n_ranks == 80 and p.n_bytes < VERY_LARGE and not p.op.is_p2p,
    ),
    _Family(name="80 H100, sends", belongs=lambda p: p.n_ranks == 80 and p.op.is_p2p),
    _Family(name="all_reduce of 4 H100, not scored", belongs=_is_read_off),
    _Family(name="16 A100 on two nodes (OCI)", belongs=_on("a100 oci")),
    _Family(
        name="16 A100 on two nodes (p4de, EFA), ≥ 512 MiB", belongs=_on("a100 p4de", VERY_LARGE)
    ),
)
FITTED = (
    *(_Family(name=family.name, belongs=family.belongs) for family in _ONE_NODE),
    _Family(
        name="2-40 H100 on several nodes",
        belongs=lambda p: p.hardware == "h100" and p.nodes > 1 and not p.op.is_p2p,
    ),
    _Family(name="16 H100 on two nodes (p5, EFA)", belongs=_on("h100 p5")),
    _Family(name="sends in one node, ≥ 256 MiB", belongs=_sends(nodes=(1,), at_least=256 * MIB)),
    _Family(name="sends in one node, smaller", belongs=_sends(nodes=(1,))),
    _Family(name="sends between two nodes", belongs=_sends(nodes=(2,))),
    _Family(name="sends among ten nodes", belongs=_sends(nodes=(10,))),
)
