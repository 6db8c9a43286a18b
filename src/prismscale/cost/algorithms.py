r"""The bytes that each collective algorithm moves over each link, and the time that this takes.

Every algorithm is described by a :class:`Load`: sequential steps over each kind of link, bytes that
a device moves over NVLink or copies, and bytes that a node moves over its network cards. Its time
is

.. math::  t = base + steps + w + 2 \sqrt{chunk \cdot w \cdot w_0 / (w + w_0)}, \qquad
           w = (w_{intra}^p + w_{inter}^p)^{1/p}

``w`` is the time on the wire. Both links form one pipeline, in which the slower one limits the
bandwidth; channels share both links, so the limit is a smooth minimum of the bandwidths. The root
is the cost of pipelining: with a message cut into ``m`` pieces, filling the pipeline costs about
``w/m`` and handling the pieces ``m·chunk``; the sum is least for ``m = sqrt(w/chunk)``. Where a
message runs down a path (trees, broadcast), every step of the path handles every piece, so
``steps`` adds to ``chunk``. Pieces stop growing at the size of the buffers, hence the ceiling
``w_0``. (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations
in MPICH", 2005, section on pipelined and ring algorithms.)

Loads follow the literature: ring and reduce/broadcast trees (Thakur et al.), double binary trees
(P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", 2009), and in-switch reduction, where a device sends its vector once and the switch returns
one reduced share: ``S·(1 + 1/n)`` bytes.

In this module a *node* is a unit that NVLink connects: a node, or all nodes of an NVLink domain.

``S`` is ``n_bytes`` in the convention of :class:`~prismscale.graph.node.CollectiveOp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prismscale.cluster import AlgorithmTuning, Cluster
from prismscale.cost.topology import TopologyFootprint
from prismscale.graph.node import CollectiveOp


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Steps and bytes that an algorithm puts on the links."""

    intra_steps: float = 0.0
    """Sequential hops inside a node."""
    inter_steps: float = 0.0
    """Sequential hops between nodes."""
    intra_bytes: float = 0.0
    """Bytes that the busiest device moves in one direction of NVLink."""
    own_bytes: float = 0.0
    """Bytes that a device copies from its own input to its own output."""
    inter_bytes: float = 0.0
    """Bytes that the busiest node moves in one direction of :attr:`inter_cards` network cards."""
    inter_cards: float = 1.0
    crossing_bytes: float = 0.0
    """Bytes that the busiest pod moves in one direction of its uplinks, if the group spans pods."""
    is_pipelined: bool = False
    """Whether the message runs piece by piece down a path on which every hop handles each piece."""


LoadRule = Callable[[CollectiveOp, float, TopologyFootprint, Cluster], Load]

_RING_PASSES: Mapping[CollectiveOp, int] = {
    CollectiveOp.ALL_REDUCE: 2,
    CollectiveOp.ALL_GATHER: 1,
    CollectiveOp.REDUCE_SCATTER: 1,
}


def cards_of(members: int, cluster: Cluster) -> float:
    """Return the number of network cards that ``members`` devices of one node can keep busy."""
    per_device = max(1.0, cluster.nics_per_node / cluster.devices_per_node)
    return min(members * per_device, float(cluster.nics_per_domain))


def ring(op: CollectiveOp, n_bytes: float, at: TopologyFootprint, cluster: Cluster) -> Load:
    """Each member passes shares (for broadcast and reduce, the whole message) to its neighbour."""
    passes = _RING_PASSES.get(op, 1)
    share = (at.size - 1) / at.size if op in _RING_PASSES else 1.0
    moved = passes * share * n_bytes
    hops = passes * (at.size - 1)
    # One round of `size` hops crosses between nodes `nodes` times.
    crossing = at.nodes / at.size if at.nodes > 1 else 0.0
    return Load(
        intra_steps=hops * (1.0 - crossing),
        inter_steps=hops * crossing,
        intra_bytes=moved if at.most > 1 else 0.0,
        own_bytes=n_bytes / at.size if at.most > 1 and op in _RING_PASSES else 0.0,
        inter_bytes=moved if at.nodes > 1 else 0.0,
        inter_cards=cards_of(at.least, cluster),
        # A ring in the order of ranks leaves each pod once, as it leaves each node once.
        crossing_bytes=moved,
        is_pipelined=op not in _RING_PASSES,
    )


def tree(op: CollectiveOp, n_bytes: float, at: TopologyFootprint, cluster: Cluster) -> Load:
    """Double binary tree between nodes, a chain inside each: up to reduce, down to broadcast."""
    passes = 2 if op == CollectiveOp.ALL_REDUCE else 1
    return Load(
        intra_steps=passes * (at.most - 1),
        inter_steps=passes * _depth(at.nodes),
        intra_bytes=passes * n_bytes if at.most > 1 else 0.0,
        inter_bytes=_tree_bytes(passes, n_bytes, at.nodes),
        inter_cards=cards_of(at.least, cluster),
        crossing_bytes=_tree_bytes(passes, n_bytes, at.nodes),
        is_pipelined=True,
    )


def hierarchical(op: CollectiveOp, n_bytes: float, at: TopologyFootprint, cluster: Cluster) -> Load:
    """In-switch reduction inside each node, double binary tree between nodes."""
    return Load(
        intra_steps=2.0,
        inter_steps=2.0 * _depth(at.nodes),
        intra_bytes=n_bytes * (1.0 + 1.0 / at.least),
        inter_bytes=_tree_bytes(2, n_bytes, at.nodes),
        inter_cards=cards_of(at.least, cluster),
        crossing_bytes=_tree_bytes(2, n_bytes, at.nodes),
        is_pipelined=True,
    )


def pairwise(op: CollectiveOp, n_bytes: float, at: TopologyFootprint, cluster: Cluster) -> Load:
    """Every member exchanges its own share with every other member directly."""
    share = n_bytes / at.size
    cards = {members: cards_of(members, cluster) for members in (at.least, at.most)}
    # Few members on a node have more peers elsewhere; many members share the cards. The slower of
    # the two cases decides.
    busiest = max(cards, key=lambda members: members * (at.size - members) / cards[members])
    return Load(
        intra_steps=float(at.most - 1),
        inter_steps=float(at.size - at.least) if at.nodes > 1 else 0.0,
        intra_bytes=share * (at.most - 1),
        own_bytes=share if at.most > 1 else 0.0,
        inter_bytes=share * busiest * (at.size - busiest) if at.nodes > 1 else 0.0,
        inter_cards=cards[busiest],
        crossing_bytes=share * at.in_pod * (at.size - at.in_pod),
    )


def rooted(op: CollectiveOp, n_bytes: float, at: TopologyFootprint, cluster: Cluster) -> Load:
    """Every member exchanges its share with the root, whose own links carry all shares."""
    share = n_bytes / at.size
    return Load(
        intra_steps=float(at.most - 1),
        inter_steps=float(at.size - at.least) if at.nodes > 1 else 0.0,
        intra_bytes=share * (at.most - 1),
        inter_bytes=share * (at.size - at.least),
        inter_cards=cards_of(1, cluster),
        crossing_bytes=share * (at.size - at.in_pod),
    )


def point_to_point(
    op: CollectiveOp, n_bytes: float, at: TopologyFootprint, cluster: Cluster
) -> Load:
    """One message from one member to another, or from each member of a ring to the next at once."""
    between = at.nodes > 1
    return Load(
        intra_steps=0.0 if between else 1.0,
        inter_steps=1.0 if between else 0.0,
        intra_bytes=0.0 if between else n_bytes,
        inter_bytes=n_bytes if between else 0.0,
        inter_cards=cards_of(1, cluster),
        crossing_bytes=n_bytes,
    )


_REDUCING = (CollectiveOp.ALL_REDUCE, CollectiveOp.BROADCAST, CollectiveOp.REDUCE)
_RULES: Mapping[str, tuple[LoadRule, tuple[CollectiveOp, ...]]] = {
    "ring": (ring, (*_REDUCING, CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER)),
    "tree": (tree, _REDUCING),
    "hierarchical": (hierarchical, (CollectiveOp.ALL_REDUCE,)),
    "pairwise": (pairwise, (CollectiveOp.ALL_TO_ALL,)),
    "rooted": (rooted, (CollectiveOp.GATHER, CollectiveOp.SCATTER)),
    "p2p": (point_to_point, (CollectiveOp.SEND, CollectiveOp.RECV)),
}
PROTOCOLS = ("", "ll128", "ll")
"""Suffixes of algorithm names. ``ring_ll`` is the ring under a protocol that trades bandwidth for
latency, ``ring_ll128`` under one in between. Their load is the same; a cluster file tunes each
separately."""


def rule_of(algorithm: str) -> tuple[LoadRule, tuple[CollectiveOp, ...]] | None:
    """Return the load rule of an algorithm and the operations it implements; None if unknown."""
    return _RULES[algorithm.partition("_")[0]] if algorithm in algorithm_names() else None


def algorithm_names() -> tuple[str, ...]:
    """Return the algorithm names that a cluster file may tune."""
    return tuple(f"{name}_{p}" if p else name for name in _RULES for p in PROTOCOLS)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostBreakdown:
    """The parts of one algorithm's time, in nanoseconds."""

    base_ns: float
    steps_ns: float
    intra_ns: float
    """Time of the bytes over NVLink alone."""
    inter_ns: float
    """Time of the bytes over the network alone."""
    wire_ns: float
    """Time of both together."""
    pipeline_ns: float
    """Cost of cutting the message into pieces."""

    @property
    def total_ns(self) -> float:
        """Time after the last arrival."""
        return self.base_ns + self.steps_ns + self.wire_ns + self.pipeline_ns


def evaluate(
    load: Load, tuning: AlgorithmTuning, cluster: Cluster, at: TopologyFootprint
) -> CostBreakdown:
    """Compute the time of ``load`` on the links of ``cluster``, for a group placed as ``at``."""
    intra_rate = cluster.intra_node.bandwidth_bytes_per_s * tuning.intra_efficiency
    # The same threads copy a member's own share. With few members this is much of their work.
    intra_ns = 1e9 * (load.intra_bytes + tuning.own_copy * load.own_bytes) / intra_rate
    inter_ns = _inter_ns(load, tuning, cluster, at)
    wire_ns = _smooth_max(intra_ns, inter_ns, cluster.overlap_power)
    steps_ns = _steps_ns(load, tuning, cluster)
    chunk_ns = tuning.chunk_ns + (steps_ns if load.is_pipelined else 0.0)
    limit_ns = tuning.chunk_limit_ns
    return CostBreakdown(
        base_ns=tuning.base_ns,
        steps_ns=steps_ns,
        intra_ns=intra_ns,
        inter_ns=inter_ns,
        wire_ns=wire_ns,
        pipeline_ns=2.0 * math.sqrt(chunk_ns * wire_ns * limit_ns / (wire_ns + limit_ns)),
    )


def share_of_cards(load: Load, cluster: Cluster, at: TopologyFootprint) -> float:
    """Return the share of the busiest node's network cards that all groups of the family use."""
    return min(1.0, _cards(load, cluster, at) * _sharing(cluster, at) / cluster.nics_per_domain)


def _sharing(cluster: Cluster, at: TopologyFootprint) -> float:
    """Return the number of groups that communicate out of a node at the same time.

    A device takes part in one communication at a time, however many of its groups are listed.
    """
    return min(at.sharing, max(1.0, cluster.devices_per_domain / at.least))


def _cards(load: Load, cluster: Cluster, at: TopologyFootprint) -> float:
    """Return the number of a node's network cards that one group has."""
    return min(load.inter_cards, cluster.nics_per_domain / _sharing(cluster, at))


def _inter_ns(
    load: Load, tuning: AlgorithmTuning, cluster: Cluster, at: TopologyFootprint
) -> float:
    """Return the time of the bytes between nodes: on a node's cards, or on a pod's uplinks."""
    card_rate = cluster.inter_node.bandwidth_bytes_per_s * tuning.inter_efficiency
    cards = _cards(load, cluster, at)
    cards_ns = 1e9 * load.inter_bytes / (card_rate * cards)
    if cluster.fabric is None or at.pods == 1:
        return cards_ns
    pod_cards = cluster.fabric.nodes_per_pod * cluster.nics_per_node
    uplink_rate = card_rate * pod_cards / cluster.fabric.oversubscription
    return max(cards_ns, 1e9 * at.pod_sharing * load.crossing_bytes / uplink_rate)


def _steps_ns(load: Load, tuning: AlgorithmTuning, cluster: Cluster) -> float:
    """Return the latency of the sequential steps.

    In a ring over several nodes a step inside a node costs more than in a ring of one node, because
    pieces go through buffers that the network cards can read.
    """
    inside = across = tuning.latency_factor
    if load.inter_steps and tuning.spanning_latency_factor is not None:
        inside = tuning.spanning_latency_factor
    if tuning.inter_latency_factor is not None:
        across = tuning.inter_latency_factor
    intra_ns = inside * load.intra_steps * cluster.intra_node.latency_ns
    return intra_ns + across * load.inter_steps * cluster.inter_node.latency_ns


def exchange_of_signals(at: TopologyFootprint, cluster: Cluster) -> CostBreakdown:
    """Compute the time of a symmetric-memory barrier (torch's ``CUDASymmetricMemory``).

    Each member writes a word into the memory of every other member, and a word comes back that the
    first was seen. The kernel around this exchange is costed separately.
    """
    link = cluster.intra_node if at.nodes == 1 else cluster.inter_node
    return CostBreakdown(
        base_ns=0.0,
        steps_ns=2.0 * link.latency_ns,
        intra_ns=0.0,
        inter_ns=0.0,
        wire_ns=0.0,
        pipeline_ns=0.0,
    )


def _smooth_max(a: float, b: float, power: float) -> float:
    low, high = min(a, b), max(a, b)
    return high * (1.0 + (low / high) ** power) ** (1.0 / power) if low > 0 else high


def _depth(nodes: int) -> int:
    return math.ceil(math.log2(nodes))


def _tree_bytes(passes: int, n_bytes: float, nodes: int) -> float:
    """Return the bytes per node and direction.

    With two nodes each tree is a single edge, used once each way. With more, a node is an inner
    node of one tree and a leaf of the other.
    """
    if nodes == 1:
        return 0.0
    return (passes if nodes > 2 else 1) * n_bytes
