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

from prismscale.devices.protocol import CaptureDevice, Mark
from prismscale.graph.builder import Names, TraceBuilder
from prismscale.graph.facts import CaptureFacts
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import HOST, GroupRecord, MemoryRecord, RankTrace
from prismscale.host_comm.shared_jitter import Spans


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A step as a part of the stream."""

    start: int
    stop: int
    follows_its_like: bool
    """Whether the step before is ordinary, so that edges across the border are as in the steady
    job."""


class NodeStream:
    """Nodes in program order and the places where steps may end."""

    def __init__(self) -> None:
        self.nodes: list[StreamNode] = []
        self.marks: list[int] = []
        """Stream length at each optimizer call's end."""
        self.signatures: list[str] = []
        """What lies between consecutive marks: equal text, equal structure."""
        self.shapes: list[str] = []
        """The same without the edges: equal text, equal work."""
        self.owners: list[int] = []
        """Which optimizer each mark is of."""
        self.reaches: list[int] = []
        """For each of these, the lowest stream position at which one of its edges begins."""
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

    def add_computation(
        self, *, preds: tuple[int, ...], lane: int, label: int, began: Mark, ended: Mark
    ) -> int:
        """Add a span of computation; returns its position."""
        return self.append(
            StreamNode(
                kind=NodeKind.COMPUTE,
                preds=preds,
                lane=lane,
                label=label,
                began=began,
                ended=ended,
            )
        )

    def took(self, positions: Sequence[int], ns: int, late_ns: int = 0) -> None:
        """Communications took so long, and the program that waited for them ran again later."""
        for position in positions:
            self.nodes[position].took_ns, self.nodes[position].late_ns = ns, late_ns

    def leave_out(self, ns: int) -> None:
        """So much of the computation that has just ended was waiting."""
        if self.nodes[-1].kind == NodeKind.COMPUTE:
            self.nodes[-1].left_out_ns += ns

    def mark(self, owner: int = 0) -> None:
        """A call of the optimizer ``owner`` ended here."""
        start = self.marks[-1] if self.marks else 0
        self.marks.append(len(self.nodes))
        self.owners.append(owner)
        self.signatures.append(self._signature(start, len(self.nodes)))

    def _signature(self, start: int, stop: int) -> str:
        digest, shape = hashlib.sha256(), hashlib.sha256()
        reach = start
        for i in range(start, stop):
            node = self.nodes[i]
            # bytes of all_to_all follow the routing of the moment: not a change of structure
            n_bytes = node.n_bytes if node.op.bytes_must_agree or node.op.is_p2p else 0
            edges = tuple(self._edge(i, p, start) for p in node.preds)
            reach = min([reach, *(p for p, e in zip(node.preds, edges, strict=True) if e < 0)])
            work = (int(node.kind), int(node.op), node.role, node.peer, n_bytes)
            digest.update(repr((*work, edges)).encode())
            shape.update(repr((*work, node.lane)).encode())
            self._places.append(self._on_lane[node.lane])
            self._on_lane[node.lane] += 1
        self.reaches.append(reach)
        self.shapes.append(shape.hexdigest())
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
        samples: Sequence[Sample],
        memory: MemoryRecord | None,
        facts: CaptureFacts,
    ) -> RankTrace:
        """The trace whose body is one step, as often measured as there are ``samples`` of it.

        The prologue ends where the first sample begins. Edges are those of the last sample that
        comes after its like: its predecessors may lie in the step before it. Where none does (a
        program that logs every second step) edges across its beginning are those by place.
        """
        first = samples[0].start
        with_edges = next((s for s in reversed(samples) if s.follows_its_like), samples[-1])
        builder = self._prologue(device, first, rank, world_size, groups)
        builder.begin_body()
        for j in range(with_edges.stop - with_edges.start):
            durations = [self._duration_ns(device, s.start + j) for s in samples]
            preds = self._body_preds(with_edges, with_edges.start + j, with_edges)
            self._emit(builder, with_edges.start + j, durations, [first + p for p in preds])
        return builder.build(known_groups=known_groups, memory=memory, facts=facts)

    def unusual(
        self,
        device: CaptureDevice,
        step: Sample,
        ordinary: Sample,
        *,
        rank: int,
        world_size: int,
        groups: Sequence[GroupRecord],
        known_groups: Sequence[GroupRecord],
        facts: CaptureFacts,
    ) -> RankTrace:
        """A step as a body without a prologue. Edges across its beginning lead to the end of an
        ordinary step."""
        builder = self._prologue(device, 0, rank, world_size, groups)
        builder.begin_body()
        for i in range(step.start, step.stop):
            preds = self._body_preds(step, i, ordinary)
            self._emit(builder, i, [self._duration_ns(device, i)], preds)
        return builder.build(known_groups=known_groups, facts=facts)

    def _body_preds(self, body: Sample, i: int, before: Sample) -> list[int]:
        """Predecessors of node ``i`` of a body, from the body's beginning; below 0 in steps before,
        which are all like ``before``."""
        found = []
        for pred in self.nodes[i].preds:
            if pred >= body.start or body.follows_its_like:
                found.append(pred - body.start)
                continue
            place = self._place_before(body.start, pred, before)
            if place is not None:
                found.append(place)
        return found

    def _place_before(self, start: int, pred: int, before: Sample) -> int | None:
        """Where ``pred`` lies before ``start``, if all before were steps like ``before``: as many
        places back on its lane. None where these have nothing on that lane."""
        lane = self.nodes[pred].lane
        back = sum(self.nodes[x].lane == lane for x in range(pred, start))
        own = [x for x in range(before.start, before.stop) if self.nodes[x].lane == lane]
        if not own:
            return None
        steps, rest = divmod(back - 1, len(own))
        return own[-1 - rest] - before.stop - steps * (before.stop - before.start)

    def steady_spans(self, device: CaptureDevice, samples: Sequence[Sample]) -> Spans:
        """Computation of some equal steps, on a device whose marks are times."""
        starts = [s.start for s in samples]
        computes = [
            j
            for j in range(samples[-1].stop - samples[-1].start)
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
            self._emit(builder, i, [self._duration_ns(device, i)], self.nodes[i].preds)
        return builder

    def _emit(
        self, builder: TraceBuilder, i: int, durations: list[int], preds: Sequence[int]
    ) -> None:
        """Add node ``i``; its predecessors are positions in the builder."""
        node = self.nodes[i]
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
