"""What a rank does, as it happens: nodes in program order, with marks in place of durations.

Shared by capture (which turns the stream into a :class:`RankTrace`) and by nothing else: a live
rank only counts communications.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prismscale.capture.device.protocol import CaptureDevice, Mark
from prismscale.capture.jitter import Spans
from prismscale.errors import UsageError
from prismscale.graph.builder import Names, TraceBuilder
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import HOST, GroupRecord, MemoryRecord, RankTrace


@dataclass(kw_only=True, slots=True)
class StreamNode:
    """One node as recorded. Predecessors are positions in the stream."""

    kind: NodeKind
    preds: tuple[int, ...]
    lane: int
    label: int
    began: Mark = 0
    ended: Mark = 0
    op: CollectiveOp = CollectiveOp.ALL_REDUCE
    role: int = -1
    peer: int = -1
    n_bytes: int = 0
    site: int = -1
    took_ns: int = 0
    """What this rank's share of a communication took where it was done; 0 where it was not."""
    late_ns: int = 0
    """How long after a communication's end the program, which waited for it, ran again."""
    left_out_ns: int = 0
    """Of a computation: what in it was waiting."""


class NodeStream:
    """Nodes in program order and the places where steps may end."""

    def __init__(self) -> None:
        self.nodes: list[StreamNode] = []
        self.marks: list[int] = []
        """Stream length at each optimizer call's end."""
        self.signatures: list[str] = []
        """What lies between consecutive marks: equal text, equal structure."""
        self.reaches: list[int] = []
        """Of each of these, where in the stream its farthest edge that is named by place begins."""
        self.lanes = Names([HOST])
        self.labels = Names([""])
        self.sites = Names()
        self._places: list[int] = []
        """Of each node before the last mark, how many of its lane came before it."""
        self._on_lane: Counter[int] = Counter()

    def append(self, node: StreamNode) -> int:
        """Add a node; returns its position."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def took(self, positions: Sequence[int], ns: int, late_ns: int = 0) -> None:
        """Communications took so long, and the program that waited for them ran again later."""
        for position in positions:
            self.nodes[position].took_ns, self.nodes[position].late_ns = ns, late_ns

    def leave_out(self, ns: int) -> None:
        """So much of the computation that has just ended was waiting."""
        if self.nodes[-1].kind == NodeKind.COMPUTE:
            self.nodes[-1].left_out_ns += ns

    def mark(self) -> None:
        """An optimizer call ended here."""
        start = self.marks[-1] if self.marks else 0
        self.marks.append(len(self.nodes))
        self.signatures.append(self._signature(start, len(self.nodes)))

    def _signature(self, start: int, stop: int) -> str:
        digest = hashlib.sha256()
        reach = start
        for i in range(start, stop):
            node = self.nodes[i]
            # bytes of all_to_all follow the routing of the moment: not a change of structure
            n_bytes = node.n_bytes if node.op.bytes_must_agree or node.op.is_p2p else 0
            edges = tuple(self._edge(i, p, start) for p in node.preds)
            reach = min([reach, *(p for p, e in zip(node.preds, edges, strict=True) if e < 0)])
            digest.update(
                repr((int(node.kind), int(node.op), node.role, node.peer, n_bytes, edges)).encode()
            )
            self._places.append(self._on_lane[node.lane])
            self._on_lane[node.lane] += 1
        self.reaches.append(reach)
        return digest.hexdigest()

    def _edge(self, node: int, pred: int, start: int) -> int:
        """An edge of ``node`` as its signature has it: the distance back, or below 0 how many
        places back on their common lane, if that lies before ``start``. A communication follows
        the one before it on its lane, however much else the program did between them once."""
        lane = self.nodes[node].lane
        if pred >= start or self.nodes[pred].lane != lane:
            return node - pred
        return self._places[pred] - self._on_lane[lane]

    def to_trace(
        self,
        device: CaptureDevice,
        *,
        rank: int,
        world_size: int,
        groups: Sequence[GroupRecord],
        known_groups: Sequence[GroupRecord],
        period: int,
        samples: int,
        memory: MemoryRecord | None,
        meta: dict[str, str],
    ) -> RankTrace:
        """The trace whose body is the last ``period`` segments, sampled ``samples`` times.

        Raises:
            UsageError: fewer than ``period * samples + 1`` optimizer calls were seen.
        """
        if len(self.marks) < period * samples + 1:
            raise UsageError(
                f"rank {rank}: the program made {len(self.marks)} optimizer calls; "
                f"{period * samples + 1} are needed to measure {samples} steps"
            )
        starts = self._starts(period, samples)
        n_body = self.marks[-1] - starts[-1]
        builder = self._prologue(device, starts[0], rank, world_size, groups)
        builder.begin_body()
        for j in range(n_body):
            durations = [self._duration_ns(device, s + j) for s in starts]
            # The last sample's edges: its predecessors may lie in the sample before it.
            self._emit(builder, starts[-1] + j, durations, starts[-1] - starts[0])
        return builder.build(known_groups=known_groups, memory=memory, meta=meta)

    def _starts(self, period: int, samples: int) -> list[int]:
        """Where the last steps begin."""
        return [self.marks[-1 - period * (k + 1)] for k in range(samples)][::-1]

    def steady_spans(self, device: CaptureDevice, period: int, samples: int) -> Spans:
        """Computation of the last ``samples`` steps, on a device whose marks are times."""
        starts = self._starts(period, samples)
        computes = [
            j
            for j in range(self.marks[-1] - starts[-1])
            if self.nodes[starts[-1] + j].kind == NodeKind.COMPUTE
        ]
        nodes = [[self.nodes[s + j] for j in computes] for s in starts]
        own_ns = [[_own_ns(device, n) for n in row] for row in nodes]
        return Spans.of_steps(
            np.array([[n.began for n in row] for row in nodes], dtype=np.int64),
            np.array([[n.ended for n in row] for row in nodes], dtype=np.int64),
            np.array(own_ns, dtype=np.int64),
        )

    def so_far(
        self, device: CaptureDevice, *, rank: int, world_size: int, groups: Sequence[GroupRecord]
    ) -> RankTrace:
        """A trace that is all prologue."""
        n_nodes = len(self.nodes)
        builder = self._prologue(device, n_nodes, rank, world_size, groups)
        builder.begin_body()
        return builder.build()

    def _prologue(
        self,
        device: CaptureDevice,
        stop: int,
        rank: int,
        world_size: int,
        groups: Sequence[GroupRecord],
    ) -> TraceBuilder:
        builder = TraceBuilder(rank=rank, world_size=world_size, groups=groups)
        builder.lanes, builder.labels, builder.sites = self.lanes, self.labels, self.sites
        for i in range(stop):
            self._emit(builder, i, [self._duration_ns(device, i)], 0)
        return builder

    def _emit(self, builder: TraceBuilder, i: int, durations: list[int], shift: int) -> None:
        node = self.nodes[i]
        preds = [p - shift for p in node.preds]
        label = self.labels.all()[node.label]
        lane = self.lanes.all()[node.lane]
        site = self.sites.all()[node.site] if node.site >= 0 else ""
        if node.kind == NodeKind.COMPUTE:
            builder.add_compute(durations, preds=preds, label=label, lane=lane, site=site)
            return
        builder.add_communication(
            node.op,
            node.n_bytes,
            role=node.role,
            peer=node.peer,
            preds=preds,
            durations_ns=durations,
            label=label,
            lane=lane,
            site=site,
        )

    def _duration_ns(self, device: CaptureDevice, i: int) -> int:
        node = self.nodes[i]
        if node.kind != NodeKind.COMPUTE:
            return node.took_ns
        late_ns = max((self.nodes[pred].late_ns for pred in node.preds), default=0)
        return max(0, _own_ns(device, node)) + late_ns


def _own_ns(device: CaptureDevice, computation: StreamNode) -> int:
    """How long it took, less what in it was waiting."""
    return device.elapsed_ns(computation.began, computation.ended) - computation.left_out_ns
