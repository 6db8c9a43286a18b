"""How long communications take after their last arrival.

:class:`CollectiveModel` is the seam. :class:`AnalyticCollectiveModel` evaluates the algorithms of
:mod:`prismscale.cost.algorithms` and takes the cheapest, as a communication library's tuner does;
:class:`TableCollectiveModel` interpolates measurements; :class:`NullCollectiveModel` costs nothing.

Array axes: ``K`` group rank, ``G`` groups of a family.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from prismscale.cluster import AlgorithmTuning, Cluster, Measured, MeasuredCurve
from prismscale.cost.algorithms import (
    CostBreakdown,
    Load,
    LoadRule,
    algorithm_names,
    evaluate,
    exchange_of_signals,
    rule_of,
    share_of_cards,
)
from prismscale.cost.topology import PlacementCache, TopologyFootprint
from prismscale.errors import UsageError, did_you_mean
from prismscale.graph.node import CollectiveOp

_TIMES_KEPT = 65_536


class LinkUse(NamedTuple):
    """How busy a communication keeps the links while it lasts, 0 to 1."""

    intra: float
    """NVLink of a device, in each direction that it uses."""
    inter: float
    """The network cards of a node."""


class CollectiveModel(Protocol):
    """Answers how long a communication takes."""

    def duration_ns(
        self, op: CollectiveOp, n_bytes: int, ranks_KG: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Time after the last arrival, for each of ``G`` groups.

        ``ranks_KG`` holds the members' global ranks. An array that was passed once must not be
        changed afterwards: what is known about it is kept.
        """
        ...


class NullCollectiveModel:
    """Communication that takes no time: what is left is computation and waiting."""

    def duration_ns(
        self, op: CollectiveOp, n_bytes: int, ranks_KG: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Zero for every group."""
        return np.zeros(ranks_KG.shape[1], dtype=np.int64)


class AnalyticCollectiveModel:
    """The cheapest algorithm that the cluster tunes, by latency and bandwidth of its links.

    Monotone in bytes, and never slower for more bandwidth: a minimum of functions that are both.

    The groups of one family, which ``ranks_KG`` holds, communicate at the same time, as those of an
    SPMD program do: where a node has fewer network cards than they ask for, or a pod's uplinks are
    oversubscribed, they share them.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._placements = PlacementCache(cluster.devices_per_domain, cluster.domains_per_pod)
        self._algorithms = {op: _algorithms_for(op, cluster) for op in CollectiveOp}
        self._time_ns = lru_cache(maxsize=_TIMES_KEPT)(self._cheapest_ns)

    def __reduce__(self) -> tuple[type[AnalyticCollectiveModel], tuple[Cluster]]:
        # Durations go to other processes with their model; what it has cached stays here.
        return type(self), (self.cluster,)

    def duration_ns(
        self, op: CollectiveOp, n_bytes: int, ranks_KG: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """See :meth:`CollectiveModel.duration_ns`. A group of one takes no time.

        Raises:
            UsageError: the cluster tunes no algorithm for ``op``.
        """
        return self._placements.spread(ranks_KG, lambda at: self._time_ns(op, n_bytes, at))

    def time_ns(self, op: CollectiveOp, n_bytes: int, at: TopologyFootprint) -> int:
        """Time after the last arrival of one group placed as ``at``."""
        return self._time_ns(op, n_bytes, at)

    def _cheapest_ns(self, op: CollectiveOp, n_bytes: int, at: TopologyFootprint) -> int:
        if at.size == 1:
            return 0
        cost, _ = self._cheapest(op, n_bytes, at)
        return round(cost.total_ns)

    def link_use(self, op: CollectiveOp, n_bytes: int, ranks_KG: NDArray[np.int64]) -> LinkUse:
        """How busy a communication of the groups of a family, all at once, keeps the links: of the
        groups that do most. A group of one uses none."""
        placements, _ = self._placements.of(ranks_KG)
        uses = [self._use(op, n_bytes, at) for at in placements if at.size > 1]
        if not uses:
            return LinkUse(intra=0.0, inter=0.0)
        return LinkUse(intra=max(u.intra for u in uses), inter=max(u.inter for u in uses))

    def _use(self, op: CollectiveOp, n_bytes: int, at: TopologyFootprint) -> LinkUse:
        cost, load = self._cheapest(op, n_bytes, at)
        if not cost.total_ns:
            return LinkUse(intra=0.0, inter=0.0)
        shared = share_of_cards(load, self.cluster, at)
        return LinkUse(
            intra=cost.intra_ns / cost.total_ns, inter=shared * cost.inter_ns / cost.total_ns
        )

    def _cheapest(
        self, op: CollectiveOp, n_bytes: int, at: TopologyFootprint
    ) -> tuple[CostBreakdown, Load]:
        if n_bytes < 0:
            raise UsageError(f"{op.spelling} of {n_bytes} bytes; bytes must be 0 or more")
        if op == CollectiveOp.SYMM_MEM_BARRIER:
            return exchange_of_signals(at, self.cluster), Load()
        if op == CollectiveOp.BARRIER:
            # NCCL has no barrier: torch runs a one-element all_reduce in its place.
            op, n_bytes = CollectiveOp.ALL_REDUCE, 1
        loads = [
            (rule(op, float(n_bytes), at, self.cluster), tuning)
            for _, rule, tuning in self._algorithms[op]
            if at.least >= tuning.min_members_per_node
        ]
        found = [(evaluate(load, tuning, self.cluster, at), load) for load, tuning in loads]
        if not found:
            raise UsageError(
                f"cluster '{self.cluster.name}' tunes no algorithm for {op.spelling} in a group of "
                f"{at.size}; tune one of: {', '.join(_names_for(op))}"
            )
        return min(found, key=lambda each: each[0].total_ns)


class TableCollectiveModel:
    """Measured times, interpolated; another model answers for what was not measured.

    Between two measured sizes time is linear in the logarithms. Below the smallest size it stays at
    the smallest size's time; above the largest it grows with the bytes, at the largest size's
    bandwidth. Where a larger message was measured as faster than a smaller one (noise), the smaller
    one's time holds for both. A group size or node count that was not measured goes to
    ``fallback``.
    """

    def __init__(self, cluster: Cluster, measured: Measured, fallback: CollectiveModel) -> None:
        self._cluster, self._measured, self._fallback = cluster, measured, fallback
        self._placements = PlacementCache(cluster.devices_per_domain)
        self._curves = {(c.op, c.group_size, c.nodes): c for c in measured.curves}
        self._time_ns = lru_cache(maxsize=_TIMES_KEPT)(self._interpolated_ns)

    def __reduce__(
        self,
    ) -> tuple[type[TableCollectiveModel], tuple[Cluster, Measured, CollectiveModel]]:
        return type(self), (self._cluster, self._measured, self._fallback)

    def duration_ns(
        self, op: CollectiveOp, n_bytes: int, ranks_KG: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """See :meth:`CollectiveModel.duration_ns`."""
        placements, _ = self._placements.of(ranks_KG)
        if all(self._curve(op, at) is not None for at in placements):
            return self._placements.spread(ranks_KG, lambda at: self._time_ns(op, n_bytes, at))
        # A family mixes placements only when it was laid across uneven nodes: one model for all.
        return self._fallback.duration_ns(op, n_bytes, ranks_KG)

    def _curve(self, op: CollectiveOp, at: TopologyFootprint) -> MeasuredCurve | None:
        return self._curves.get((_measured_as(op), at.size, at.nodes))

    def _interpolated_ns(self, op: CollectiveOp, n_bytes: int, at: TopologyFootprint) -> int:
        curve = self._curves[(_measured_as(op), at.size, at.nodes)]
        return _interpolate(curve.n_bytes, curve.time_ns, n_bytes)


class RescaledCollectives:
    """Another model's times on a cluster whose links became faster or slower: times what this makes
    of the analytic model's time. For measured times, which links do not explain."""

    def __init__(self, model: CollectiveModel, before: Cluster, after: Cluster) -> None:
        self._model = model
        self._before, self._after = AnalyticCollectiveModel(before), AnalyticCollectiveModel(after)

    def duration_ns(
        self, op: CollectiveOp, n_bytes: int, ranks_KG: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """See :meth:`CollectiveModel.duration_ns`."""
        before_G, after_G = (
            np.maximum(model.duration_ns(op, n_bytes, ranks_KG), 1)
            for model in (self._before, self._after)
        )
        known_G = self._model.duration_ns(op, n_bytes, ranks_KG)
        return np.rint(known_G * (after_G / before_G)).astype(np.int64)


def collective_model(cluster: Cluster) -> CollectiveModel:
    """The model of ``cluster``: its measurements where it has some, else the analytic model."""
    analytic = AnalyticCollectiveModel(cluster)
    if cluster.measured is None:
        return analytic
    return TableCollectiveModel(cluster, cluster.measured, analytic)


def _algorithms_for(
    op: CollectiveOp, cluster: Cluster
) -> list[tuple[str, LoadRule, AlgorithmTuning]]:
    found = []
    for name, tuning in cluster.algorithms.items():
        known = rule_of(name)
        if known is None:
            hint = did_you_mean(name, algorithm_names())
            raise UsageError(f"cluster '{cluster.name}' tunes unknown algorithm '{name}'; {hint}")
        rule, ops = known
        if op in ops:
            found.append((name, rule, tuning))
    return found


def _names_for(op: CollectiveOp) -> list[str]:
    return [name for name in algorithm_names() if op in (rule_of(name) or (None, ()))[1]]


def _measured_as(op: CollectiveOp) -> CollectiveOp:
    return CollectiveOp.SEND if op == CollectiveOp.RECV else op


def _interpolate(n_bytes: tuple[int, ...], values: tuple[float, ...], at_bytes: int) -> int:
    rising = np.maximum.accumulate(np.asarray(values, dtype=np.float64))
    if at_bytes > n_bytes[-1] and n_bytes[-1] > 1:
        return round(float(rising[-1]) * at_bytes / n_bytes[-1])
    clipped = max(at_bytes, n_bytes[0])
    log_value = np.interp(np.log(clipped), np.log(n_bytes), np.log(np.maximum(rising, 1.0)))
    return round(float(np.exp(log_value)))
