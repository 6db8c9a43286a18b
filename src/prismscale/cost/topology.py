"""Placement of process groups on nodes and pods, on which the time of their collectives depends.

Array axes: ``K`` group rank, ``G`` groups of a family.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import UsageError

_FAMILIES_KEPT = 512


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class TopologyFootprint:
    """Shape of one group on the nodes. Groups of equal shape take equal time."""

    size: int
    """Members of the group."""
    nodes: int
    """Nodes that hold at least one member."""
    most: int
    """Members on the node that holds most of them."""
    least: int
    """Members on the node that holds fewest of them, but at least one."""
    sharing: int = 1
    """Groups of the family, this one included, that communicate out of one of this group's nodes:
    the node with most such groups. They communicate at the same time and share its network cards.
    1 for a group on one node."""
    pods: int = 1
    """Pods that hold at least one member; 1 where the cluster describes no fabric."""
    in_pod: int = 0
    """Members in the pod that holds most of them; 0 where the group stays in one pod."""
    pod_sharing: int = 1
    """Groups of the family that communicate out of one of the group's pods: the pod with most such
    groups. They share its uplinks."""


def place(
    ranks_KG: NDArray[np.int64], devices_per_node: int, nodes_per_pod: int = 0
) -> tuple[tuple[TopologyFootprint, ...], NDArray[np.int64]]:
    """Return the distinct placements of ``G`` groups, and each group's index into them (``[G]``).

    ``nodes_per_pod`` 0 means that all nodes are of one pod.
    """
    size, n_groups = ranks_KG.shape
    if n_groups == 0:
        return (), np.empty(0, dtype=np.int64)
    node_KG = ranks_KG // devices_per_node
    nodes_G, most_G, least_G, sharing_G = _spread_over(node_KG)
    pods_G, in_pod_G = np.ones_like(nodes_G), np.zeros_like(nodes_G)
    pod_sharing_G = np.ones_like(nodes_G)
    if nodes_per_pod:
        pods_G, in_pod_G, _, pod_sharing_G = _spread_over(node_KG // nodes_per_pod)
        in_pod_G = np.where(pods_G > 1, in_pod_G, 0)
    columns = (nodes_G, most_G, least_G, sharing_G, pods_G, in_pod_G, pod_sharing_G)
    shapes, index_G = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return tuple(_footprint(size, shape) for shape in shapes), index_G.reshape(n_groups)


def _footprint(size: int, shape: NDArray[np.int64]) -> TopologyFootprint:
    nodes, most, least, sharing, pods, in_pod, pod_sharing = (int(value) for value in shape)
    return TopologyFootprint(
        size=size,
        nodes=nodes,
        most=most,
        least=least,
        sharing=sharing,
        pods=pods,
        in_pod=in_pod,
        pod_sharing=pod_sharing,
    )


def _spread_over(place_KG: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Count, for each group, the places (nodes or pods) that hold members, and what they hold.

    Returns:
        For each group: its places; the members on its fullest and on its emptiest place; and the
        most groups that share one of its places, counting groups of more than one place.
    """
    size, n_groups = place_KG.shape
    node_KG = np.sort(place_KG, axis=0)
    starts_KG = np.ones((size, n_groups), dtype=bool)
    np.not_equal(node_KG[1:], node_KG[:-1], out=starts_KG[1:])
    nodes_G = starts_KG.sum(axis=0)

    # With the groups one after another, a run of equal nodes ends where the next one begins.
    start_at = np.flatnonzero(starts_KG.T.ravel())
    run_lengths = np.diff(start_at, append=size * n_groups)
    first_run_G = np.cumsum(nodes_G) - nodes_G
    most_G = np.maximum.reduceat(run_lengths, first_run_G)
    least_G = np.minimum.reduceat(run_lengths, first_run_G)

    # A place is shared by the groups that have a run of members there and other members elsewhere.
    run_place = node_KG.T.ravel()[start_at]
    leaves = np.repeat(nodes_G > 1, nodes_G)
    _, at, count = np.unique(run_place[leaves], return_inverse=True, return_counts=True)
    sharers = np.ones(len(start_at), dtype=np.int64)
    sharers[leaves] = count[at.ravel()]
    return nodes_G, most_G, least_G, np.maximum.reduceat(sharers, first_run_G)


class PlacementCache:
    """Caches placements by the identity of the rank table: a job uses few tables, many times."""

    def __init__(self, devices_per_node: int, nodes_per_pod: int = 0) -> None:
        self._devices_per_node = devices_per_node
        self._nodes_per_pod = nodes_per_pod
        self._known: OrderedDict[int, _KnownFootprints] = OrderedDict()

    def of(
        self, ranks_KG: NDArray[np.int64]
    ) -> tuple[tuple[TopologyFootprint, ...], NDArray[np.int64]]:
        """Return :func:`place` of a table that does not change.

        Raises:
            UsageError: the array is not a table of group ranks by groups, or has empty groups.
        """
        known = self._known.get(id(ranks_KG))
        if known is not None:
            return known.placements, known.index_G
        if ranks_KG.ndim != 2 or ranks_KG.shape[0] == 0:
            raise UsageError(f"ranks of shape {ranks_KG.shape}; expected [group rank, group]")
        placements, index_G = place(ranks_KG, self._devices_per_node, self._nodes_per_pod)
        # The entry keeps the table alive, so that its id cannot be reused for another table.
        self._known[id(ranks_KG)] = _KnownFootprints(ranks_KG, placements, index_G)
        if len(self._known) > _FAMILIES_KEPT:
            self._known.popitem(last=False)
        return placements, index_G

    def spread(
        self, ranks_KG: NDArray[np.int64], time_ns: Callable[[TopologyFootprint], int]
    ) -> NDArray[np.int64]:
        """Return ``time_ns`` of every group's placement, called once per distinct placement."""
        placements, index_G = self.of(ranks_KG)
        if len(placements) == 1:
            return np.full(len(index_G), time_ns(placements[0]), dtype=np.int64)
        times = np.fromiter((time_ns(at) for at in placements), np.int64, len(placements))
        return times[index_G]


@dataclass(frozen=True, slots=True)
class _KnownFootprints:
    ranks_KG: NDArray[np.int64]
    placements: tuple[TopologyFootprint, ...]
    index_G: NDArray[np.int64]
