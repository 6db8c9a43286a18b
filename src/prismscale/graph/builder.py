"""Converts nodes to the columns of a trace.

The nodes come from a recorded stream, or are added to a :class:`TraceBuilder` one by one, as
imports and tests do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.facts import CaptureFacts
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import HOST, NO_GROUP, GroupRecord, MemoryRecord, RankTrace


@dataclass(kw_only=True, slots=True)
class TraceNode:
    """One node before conversion to columns; see :class:`TraceColumns` for the fields.

    Predecessors are positions in the list of nodes that this node belongs to.
    """

    kind: NodeKind
    preds: tuple[int, ...] = ()
    lane: int = 0
    label: int = 0
    op: CollectiveOp = CollectiveOp.ALL_REDUCE
    group_index: int = NO_GROUP
    peer: int = -1
    n_bytes: int = 0
    site: int = -1


def node_columns(
    nodes: Sequence[TraceNode], preds: Sequence[Sequence[int]]
) -> dict[str, NDArray[Any]]:
    """Return the columns of nodes and their edges, by the field names of :class:`TraceColumns`.

    Args:
        nodes: in program order.
        preds: for each node, the positions of its predecessors in ``nodes``; negative for nodes of
            earlier steps, counting back from the first node.
    """
    return {
        "kind_N": np.array([n.kind for n in nodes], dtype=np.uint8),
        "op_N": np.array([n.op for n in nodes], dtype=np.uint8),
        "lane_N": np.array([n.lane for n in nodes], dtype=np.int16),
        "group_index_N": np.array([n.group_index for n in nodes], dtype=np.int16),
        "peer_N": np.array([n.peer for n in nodes], dtype=np.int32),
        "bytes_N": np.array([n.n_bytes for n in nodes], dtype=np.int64),
        "site_N": np.array([n.site for n in nodes], dtype=np.int32),
        "label_N": np.array([n.label for n in nodes], dtype=np.int32),
        "pred_start_N1": np.cumsum([0, *map(len, preds)], dtype=np.int32),
        "pred_distance_P": np.array(
            [i - p for i, row in enumerate(preds) for p in row], dtype=np.int32
        ),
    }


class Names:
    """Interned strings, numbered in order of first use."""

    def __init__(self, first: Iterable[str] = ()) -> None:
        self._ids: dict[str, int] = {}
        for name in first:
            self.id(name)

    def id(self, name: str) -> int:
        """Return the index of ``name``, adding it if it is new."""
        return self._ids.setdefault(name, len(self._ids))

    def all(self) -> tuple[str, ...]:
        """Return all names by index."""
        return tuple(self._ids)


class TraceBuilder:
    """Collects nodes in program order and builds a trace from them.

    Predecessors are given as positions that ``add_*`` returned. A negative position means a node of
    the previous body: ``pred - body_length``.
    """

    def __init__(
        self, *, rank: int, world_size: int, groups: Sequence[GroupRecord] | None = None
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._groups = tuple(groups or (GroupRecord(ranks=tuple(range(world_size))),))
        self._nodes: list[TraceNode] = []
        self._durations_ns: list[list[int]] = []
        """Durations of each node: one, or one per sampled step."""
        self._n_prologue = 0
        self.lanes = Names([HOST])
        self.labels = Names([""])
        self.sites = Names()

    def __len__(self) -> int:
        return len(self._nodes)

    def add_compute(
        self,
        durations_ns: int | Sequence[int],
        *,
        preds: Iterable[int] = (),
        label: str = "",
        lane: str = HOST,
        site: str = "",
    ) -> int:
        """Append a computation with one duration, or one per sampled step; return its position."""
        node = TraceNode(kind=NodeKind.COMPUTE, preds=tuple(preds))
        return self._add(node, durations_ns, label, lane, site)

    def add_communication(
        self,
        op: CollectiveOp,
        n_bytes: int,
        *,
        group_index: int = 0,
        peer: int = -1,
        tag: int = 0,
        preds: Iterable[int] = (),
        durations_ns: int | Sequence[int] = 0,
        label: str = "",
        lane: str = "communication",
        site: str = "",
    ) -> int:
        """Append a communication; return its position.

        ``peer`` is relative to this rank for send and recv, and the root of rooted collectives.
        ``tag`` is that of a send or recv.
        """
        kinds = {CollectiveOp.SEND: NodeKind.SEND, CollectiveOp.RECV: NodeKind.RECV}
        if op.is_p2p:
            size = len(self._groups[group_index].ranks)
            peer = peer % size + size * tag
        node = TraceNode(
            kind=kinds.get(op, NodeKind.COLLECTIVE),
            op=op,
            group_index=group_index,
            peer=peer,
            n_bytes=n_bytes,
            preds=tuple(preds),
        )
        return self._add(node, durations_ns, label or op.spelling, lane, site)

    def begin_body(self) -> None:
        """End the prologue. All nodes added so far belong to it."""
        self._n_prologue = len(self._nodes)

    def build(
        self,
        *,
        known_groups: Sequence[GroupRecord] | None = None,
        memory: MemoryRecord | None = None,
        facts: CaptureFacts | None = None,
    ) -> RankTrace:
        """Build the trace.

        Raises:
            ValueError: body nodes have different numbers of sampled durations.
        """
        prologue = self._n_prologue
        body = self._durations_ns[prologue:]
        samples = max(map(len, body), default=1)
        if any(len(d) not in (1, samples) for d in body):
            raise ValueError("body nodes have different numbers of sampled durations")
        body_ns = [d * samples if len(d) == 1 else d for d in body]
        return RankTrace(
            rank=self._rank,
            world_size=self._world_size,
            groups=self._groups,
            known_groups=tuple(known_groups if known_groups is not None else self._groups),
            n_prologue=prologue,
            **node_columns(self._nodes, [node.preds for node in self._nodes]),
            prologue_ns=np.array([d[0] for d in self._durations_ns[:prologue]], dtype=np.int64),
            body_ns_SB=np.array(body_ns, dtype=np.int64).reshape(len(body), samples).T.copy(),
            lanes=self.lanes.all(),
            labels=self.labels.all(),
            sites=self.sites.all(),
            memory=memory,
            facts=facts or CaptureFacts(),
        )

    def _add(
        self, node: TraceNode, durations_ns: int | Sequence[int], label: str, lane: str, site: str
    ) -> int:
        self._durations_ns.append(
            [durations_ns] if isinstance(durations_ns, int) else [int(d) for d in durations_ns]
        )
        node.label, node.lane = self.labels.id(label), self.lanes.id(lane)
        node.site = self.sites.id(site) if site else -1
        self._nodes.append(node)
        return len(self._nodes) - 1
