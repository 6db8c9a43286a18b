"""Models of how long a communication takes after its last member has arrived.

They implement :class:`CollectiveModel`. :class:`AnalyticCollectiveModel` evaluates the algorithms
of :mod:`prismscale.cost.algorithms` and takes the cheapest, as a communication library's tuner
does; :class:`TableCollectiveModel` interpolates measurements; :class:`NullCollectiveModel` always
returns 0.

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
    """How busy a communication keeps the links while it runs, from 0 to 1."""

    intra: float
    """Use of one device's NVLink, in each direction that the communication uses."""
    inter: float
    """Use of one node's network cards."""


class CollectiveModel(Protocol):
    """Gives the duration of a communication."""

    def duration_ns(
        self, op: CollectiveOp, n_bytes: int, ranks_KG: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the time after the last arrival, for each of ``G`` groups.

        ``ranks_KG`` holds the members' global ranks. The caller must not change the array
        afterwards, because models cache the placements of an array that they have seen.
        """
        ...


class NullCollectiveModel:
    """Null implementation: communication takes no time; only computation and waiting are left."""

    def duration_ns(
        self, op: CollectiveOp, n_bytes: int, ranks_KG: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return zero for every group."""
        return np.zeros(ranks_KG.shape[1], dtype=np.int64)


class AnalyticCollectiveModel:
    """Takes the cheapest of the algorithms that the cluster tunes, by its links.

    The time is monotone in bytes and never longer with more bandwidth: it is a minimum of functions
    that have both properties.

    ``ranks_KG`` holds the groups of one family. They are taken to communicate at the same time, as
    in an SPMD program: they share the network cards of a node that has fewer than they ask for, and
    the uplinks of a pod where these are oversubscribed.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._placements = PlacementCache(cluster.devices_per_domain, cluster.domains_per_pod)
        self._algorithms = {op: _algorithms_for(op, cluster) for op in CollectiveOp}
        self._time_ns = lru_cache(maxsize=_TIMES_KEPT)(self._cheapest_ns)

    def __reduce__(self) -> tuple[type[AnalyticCollectiveModel], tuple[Cluster]]:
        # The model is sent to other processes together with the durations, without its caches.
        return type(self), (self.cluster,)

    def duration_ns(
        self, op: CollectiveOp, n_bytes: int, ranks_KG: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """See :meth:`CollectiveModel.duration_ns`. A group of one rank takes no time.

        Raises:
            UsageError: the cluster tunes no algorithm for ``op``.
        """
        return self._placements.spread(ranks_KG, lambda at: self._time_ns(op, n_bytes, at))

    def time_ns(self, op: CollectiveOp, n_bytes: int, at: TopologyFootprint) -> int:
        """Return the time after the last arrival of one group with the placement ``at``."""
        return self._time_ns(op, n_bytes, at)

    def _cheapest_ns(self, op: CollectiveOp, n_bytes: int, at: TopologyFootprint) -> int:
        if at.size == 1:
            return 0
        cost, _ = self._cheapest(op, n_bytes, at)
        return round(cost.total_ns)

    def link_use(self, op: CollectiveOp, n_bytes: int, ranks_KG: NDArray[np.int64]) -> LinkUse:
        """Return how busy the links are while all groups of a family communicate at once.

        Each of the two figures is the largest over the groups. A group of one rank uses no link.
        """
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
    """Interpolates measured times; another model answers for what was not measured.

    Between two measured sizes the interpolation is linear in the logarithms of size and time. Below
    the smallest size the time stays at the smallest size's; above the largest it grows with the
    bytes, at the largest size's bandwidth. Where a larger message was measured as faster than a
    smaller one (noise), the smaller one's time holds for both. For a group size or node count that
    was not measured, ``fallback`` answers.
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
        # A family mixes placements only on uneven nodes. One model then answers for all its groups.
        return self._fallback.duration_ns(op, n_bytes, ranks_KG)

    def _curve(self, op: CollectiveOp, at: TopologyFootprint) -> MeasuredCurve | None:
        return self._curves.get((_measured_as(op), at.size, at.nodes))

    def _interpolated_ns(self, op: CollectiveOp, n_bytes: int, at: TopologyFootprint) -> int:
        curve = self._curves[(_measured_as(op), at.size, at.nodes)]
        return _interpolate(curve.n_bytes, curve.time_ns, n_bytes)


class RescaledCollectives:
    """Another model's times, rescaled to a cluster whose links became faster or slower.

    Each time is multiplied by the ratio of the analytic model's times on the two clusters. This
    serves measured times, which do not follow from the figures of the links.
    """

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
    """Return the model of ``cluster``: its measurements if it has any, else the analytic model."""
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
