"""What a rank does, as it happens: nodes in program order, with marks in place of durations.

Capture turns the stream into the columns of a :class:`RankTrace`. A live rank has no stream: it
follows a trace and only counts communications.

[Note: when a node is final] A node is final as it is appended, and its signature is taken at the
next mark. Three figures become known later. They lie beside the nodes, by position, and the stream
alone writes them. What in a computation was waiting is told at the wait that ended it, before the
next node is appended. What a communication took, and how late the program that waited for it ran
again, is told when its work is done: perhaps from a thread of the backend's, perhaps again by the
program, and the last word counts. In a slice it is told after the program's end, once the ranks
have read each other's logs. So durations are read last of all. Where time is modelled nothing is
told, and a witness may read them at every mark.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prismscale.devices.protocol import CaptureDevice, Mark
from prismscale.graph.builder import Names, TraceNode, node_columns
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import HOST, TraceColumns
from prismscale.host_comm.shared_jitter import Spans


@dataclass(kw_only=True, slots=True)
class StreamNode(TraceNode):
    """One node as recorded. Predecessors are positions in the stream. Nobody changes a node that
    was appended: see [Note: when a node is final]."""

    began: Mark = 0
    ended: Mark = 0


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
        # The next two: see [Note: when a node is final].
        self._ends: dict[int, tuple[int, int]] = {}
        """Of communications whose end was told: what this rank's share took, and how long after the
        end the program, which waited for it, ran again; in ns, by position."""
        self._left_out_ns: Counter[int] = Counter()
        """Of computations, by position: what in it was waiting."""

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
            # One assignment: a thread of the backend's may be telling, too.
            self._ends[position] = ns, late_ns

    def leave_out(self, ns: int) -> None:
        """So much of the computation that has just ended was waiting."""
        last = len(self.nodes) - 1
        if self.nodes[last].kind == NodeKind.COMPUTE:
            self._left_out_ns[last] += ns

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
            # Before this node is counted below: a lane's places are those of nodes before it.
            edges = tuple(self._edge(i, p, start) for p in node.preds)
            reach = min([reach, *(p for p, e in zip(node.preds, edges, strict=True) if e < 0)])
            work = (int(node.kind), int(node.op), node.group_index, node.peer, n_bytes)
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

    def columns(self, device: CaptureDevice, samples: Sequence[Sample]) -> TraceColumns:
        """The program whose body is one step, as often measured as there are ``samples`` of it.

        The prologue ends where the first sample begins. Edges are those of the last sample that
        comes after its like: its predecessors may lie in the step before it. Where none does (a
        program that logs every second step) edges across its beginning are those by place.
        """
        body = next((s for s in reversed(samples) if s.follows_its_like), samples[-1])
        return self._columns(device, samples[0].start, body, samples, before=body)

    def unusual_columns(
        self, device: CaptureDevice, step: Sample, ordinary: Sample
    ) -> TraceColumns:
        """A step as a body without a prologue. Edges across its beginning lead to the end of an
        ordinary step."""
        return self._columns(device, 0, step, [step], before=ordinary)

    def columns_so_far(self, device: CaptureDevice) -> TraceColumns:
        """All nodes as a prologue, with an empty body."""
        n = len(self.nodes)
        nothing = Sample(start=n, stop=n, follows_its_like=True)
        return self._columns(device, n, nothing, [nothing], before=nothing)

    def _columns(
        self,
        device: CaptureDevice,
        n_prologue: int,
        body: Sample,
        samples: Sequence[Sample],
        *,
        before: Sample,
    ) -> TraceColumns:
        """The first nodes as a prologue, and ``body`` with the durations of all ``samples``; steps
        before the body are like ``before``."""
        prologue, inner = range(n_prologue), range(body.start, body.stop)
        body_preds = (self._body_preds(body, i, before) for i in inner)
        preds = [
            *(self.nodes[i].preds for i in prologue),
            *([n_prologue + p for p in row] for row in body_preds),
        ]
        body_ns = [
            [self._duration_ns(device, s.start + j) for j in range(len(inner))] for s in samples
        ]
        return TraceColumns(
            n_prologue=n_prologue,
            **node_columns([self.nodes[i] for i in (*prologue, *inner)], preds),
            prologue_ns=np.array([self._duration_ns(device, i) for i in prologue], dtype=np.int64),
            body_ns_SB=np.array(body_ns, dtype=np.int64).reshape(len(samples), len(inner)),
            lanes=self.lanes.all(),
            labels=self.labels.all(),
            sites=self.sites.all(),
        )

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
        last = samples[-1]
        computes = [
            i - last.start
            for i in range(last.start, last.stop)
            if self.nodes[i].kind == NodeKind.COMPUTE
        ]
        places = [[s.start + j for j in computes] for s in samples]
        nodes = [[self.nodes[i] for i in row] for row in places]
        own_ns = [[self._own_ns(device, i) for i in row] for row in places]
        return Spans.of_steps(
            np.array([[n.began for n in row] for row in nodes], dtype=np.int64),
            np.array([[n.ended for n in row] for row in nodes], dtype=np.int64),
            np.array(own_ns, dtype=np.int64),
        )

    def _duration_ns(self, device: CaptureDevice, i: int) -> int:
        node = self.nodes[i]
        if node.kind != NodeKind.COMPUTE:
            return self._ends.get(i, (0, 0))[0]
        # The program ran again late: that is time of the computation that waited.
        late_ns = max((self._ends.get(pred, (0, 0))[1] for pred in node.preds), default=0)
        return max(0, self._own_ns(device, i)) + late_ns

    def _own_ns(self, device: CaptureDevice, i: int) -> int:
        """How long computation ``i`` took, less what in it was waiting."""
        node = self.nodes[i]
        return device.elapsed_ns(node.began, node.ended) - self._left_out_ns[i]
