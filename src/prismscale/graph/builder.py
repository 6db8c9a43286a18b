"""Writes a :class:`RankTrace` node by node: used by the recorder, imports and tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from prismscale.graph.facts import CaptureFacts
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import HOST, NO_ROLE, GroupRecord, MemoryRecord, RankTrace


@dataclass(kw_only=True, slots=True)
class _Node:
    kind: NodeKind
    op: int = 0
    lane: int = 0
    role: int = NO_ROLE
    peer: int = -1
    n_bytes: int = 0
    site: int = -1
    label: int = 0
    preds: tuple[int, ...] = ()
    durations_ns: list[int] = field(default_factory=list)


class Names:
    """Interned strings in order of first use."""

    def __init__(self, first: Iterable[str] = ()) -> None:
        self._ids: dict[str, int] = {}
        for name in first:
            self.id(name)

    def id(self, name: str) -> int:
        """Index of ``name``, new if need be."""
        return self._ids.setdefault(name, len(self._ids))

    def all(self) -> tuple[str, ...]:
        """All names by index."""
        return tuple(self._ids)


class TraceBuilder:
    """Collects nodes in program order. Predecessors are given as positions returned by ``add_*``;
    a negative position means a node of the previous body: ``pred - body_length``."""

    def __init__(
        self, *, rank: int, world_size: int, groups: Sequence[GroupRecord] | None = None
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._groups = tuple(groups or (GroupRecord(ranks=tuple(range(world_size))),))
        self._nodes: list[_Node] = []
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
        """Append a computation; one duration, or one per sampled step. Returns its position."""
        return self._add(
            _Node(kind=NodeKind.COMPUTE, preds=tuple(preds)), durations_ns, label, lane, site
        )

    def add_communication(
        self,
        op: CollectiveOp,
        n_bytes: int,
        *,
        role: int = 0,
        peer: int = -1,
        preds: Iterable[int] = (),
        durations_ns: int | Sequence[int] = 0,
        label: str = "",
        lane: str = "communication",
        site: str = "",
    ) -> int:
        """Append a communication. ``peer`` is relative for send/recv, the root for rooted ones."""
        kinds = {CollectiveOp.SEND: NodeKind.SEND, CollectiveOp.RECV: NodeKind.RECV}
        if op.is_p2p:
            peer %= len(self._groups[role].ranks)
        node = _Node(
            kind=kinds.get(op, NodeKind.COLLECTIVE),
            op=int(op),
            role=role,
            peer=peer,
            n_bytes=n_bytes,
            preds=tuple(preds),
        )
        return self._add(node, durations_ns, label or op.spelling, lane, site)

    def begin_body(self) -> None:
        """Everything so far was prologue."""
        self._n_prologue = len(self._nodes)

    def build(
        self,
        *,
        known_groups: Sequence[GroupRecord] | None = None,
        memory: MemoryRecord | None = None,
        facts: CaptureFacts | None = None,
    ) -> RankTrace:
        """The finished trace.

        Raises:
            ValueError: body nodes with different numbers of sampled durations.
        """
        nodes, prologue = self._nodes, self._n_prologue
        preds = [[i - p for p in node.preds] for i, node in enumerate(nodes)]
        body = [n.durations_ns for n in nodes[prologue:]]
        samples = max((len(d) for d in body), default=1)
        if any(len(d) not in (1, samples) for d in body):
            raise ValueError("body nodes have different numbers of sampled durations")
        body_ns = [d * samples if len(d) == 1 else d for d in body]
        return RankTrace(
            rank=self._rank,
            world_size=self._world_size,
            groups=self._groups,
            known_groups=tuple(known_groups if known_groups is not None else self._groups),
            n_prologue=prologue,
            kind_N=np.array([n.kind for n in nodes], dtype=np.uint8),
            op_N=np.array([n.op for n in nodes], dtype=np.uint8),
            lane_N=np.array([n.lane for n in nodes], dtype=np.int16),
            role_N=np.array([n.role for n in nodes], dtype=np.int16),
            peer_N=np.array([n.peer for n in nodes], dtype=np.int32),
            bytes_N=np.array([n.n_bytes for n in nodes], dtype=np.int64),
            site_N=np.array([n.site for n in nodes], dtype=np.int32),
            label_N=np.array([n.label for n in nodes], dtype=np.int32),
            pred_start_N1=np.cumsum([0, *map(len, preds)], dtype=np.int32),
            pred_distance_P=np.array([d for row in preds for d in row], dtype=np.int32),
            prologue_ns=np.array([n.durations_ns[0] for n in nodes[:prologue]], dtype=np.int64),
            body_ns_SB=np.array(body_ns, dtype=np.int64).reshape(len(body), samples).T.copy(),
            lanes=self.lanes.all(),
            labels=self.labels.all(),
            sites=self.sites.all(),
            memory=memory,
            facts=facts or CaptureFacts(),
        )

    def _add(
        self, node: _Node, durations_ns: int | Sequence[int], label: str, lane: str, site: str
    ) -> int:
        node.durations_ns = (
            [durations_ns] if isinstance(durations_ns, int) else [int(d) for d in durations_ns]
        )
        node.label, node.lane = self.labels.id(label), self.lanes.id(lane)
        node.site = self.sites.id(site) if site else -1
        self._nodes.append(node)
        return len(self._nodes) - 1
