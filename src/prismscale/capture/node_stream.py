"""Records a rank while it runs: nodes in program order, with marks in place of durations.

Capture turns the stream into the columns of a :class:`RankTrace`. A live rank has no stream: it
follows a trace and only counts communications.

[Note: when a node is final] A node never changes after it was appended, and its signature is taken
at the next mark. Three figures become known later. They are kept beside the nodes, by position, and
only the stream writes them. The waiting time within a computation is reported at the wait that
ended it, before the next node is appended. The duration of a communication, and the delay after
which the program that waited for it ran again, are reported when its work is done: perhaps from a
thread of the backend, perhaps once more by the program; the last report counts. In a slice they are
reported after the program's end, once the ranks have read each other's logs. So durations are read
last of all. Where time is modelled nothing is reported later, and a witness may read durations at
every mark.
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
    """One node as recorded, with predecessors as positions in the stream.

    No node is changed after it was appended: see [Note: when a node is final].
    """

    began: Mark = 0
    ended: Mark = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One step as a range of positions in the stream."""

    start: int
    stop: int
    follows_its_like: bool
    """Whether the step before is ordinary, so that edges across the border are as in the steady
    job."""


class NodeStream:
    """The nodes of a rank in program order, and the marks at which steps may end."""

    def __init__(self) -> None:
        self.nodes: list[StreamNode] = []
        self.marks: list[int] = []
        """Stream length at the end of each optimizer call."""
        self.signatures: list[str] = []
        """Hash of the nodes between consecutive marks: equal hashes mean equal structure."""
        self.shapes: list[str] = []
        """The same without the edges: equal hashes mean equal work."""
        self.owners: list[int] = []
        """For each mark, the optimizer whose call it ends."""
        self.reaches: list[int] = []
        """For each mark, the lowest position of a predecessor that its signature encodes by place.
        It is the start of the mark's nodes where there is no such predecessor."""
        self.lanes = Names([HOST])
        self.labels = Names([""])
        self.sites = Names()
        self._places: list[int] = []
        """For each node before the last mark, the number of earlier nodes on its lane."""
        self._on_lane: Counter[int] = Counter()
        # The next two: see [Note: when a node is final].
        self._ends: dict[int, tuple[int, int]] = {}
        """By position, for communications whose end was reported: the duration of this rank's
        share, and the delay until the program, which waited for it, ran again; both in ns."""
        self._left_out_ns: Counter[int] = Counter()
        """By position, for computations: the waiting time within."""

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
        """Note the duration of communications, and how late the waiting program ran again."""
        for position in positions:
            # A single assignment, because a thread of the backend may be writing too.
            self._ends[position] = ns, late_ns

    def leave_out(self, ns: int) -> None:
        """Note that ``ns`` of the computation that has just ended were waiting."""
        last = len(self.nodes) - 1
        if self.nodes[last].kind == NodeKind.COMPUTE:
            self._left_out_ns[last] += ns

    def mark(self, owner: int = 0) -> None:
        """Mark that a call of the optimizer ``owner`` ended here."""
        start = self.marks[-1] if self.marks else 0
        self.marks.append(len(self.nodes))
        self.owners.append(owner)
        self.signatures.append(self._signature(start, len(self.nodes)))

    def _signature(self, start: int, stop: int) -> str:
        digest, shape = hashlib.sha256(), hashlib.sha256()
        reach = start
        for i in range(start, stop):
            node = self.nodes[i]
            # The bytes of all_to_all follow the current routing: no change of structure.
            n_bytes = node.n_bytes if node.op.bytes_must_agree or node.op.is_p2p else 0
            # Before this node is counted below: a place is counted from the nodes before it.
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
        """Return an edge of ``node`` as its signature encodes it.

        This is the distance back. If ``pred`` lies before ``start`` on the lane of ``node``, it is
        the negative number of places back on that lane instead: a communication follows the one
        before it on its lane, no matter how much else the program once did between them.
        """
        lane = self.nodes[node].lane
        if pred >= start or self.nodes[pred].lane != lane:
            return node - pred
        return self._places[pred] - self._on_lane[lane]

    def columns(self, device: CaptureDevice, samples: Sequence[Sample]) -> TraceColumns:
        """Return the program whose body is one step, with the durations of all ``samples``.

        The prologue ends where the first sample begins. The edges are those of the last sample that
        follows an ordinary step, because its predecessors may lie in the step before it. If no
        sample does (a program that logs every second step), edges across the beginning of the body
        are found by their place on their lane.
        """
        body = next((s for s in reversed(samples) if s.follows_its_like), samples[-1])
        return self._columns(device, samples[0].start, body, samples, before=body)

    def unusual_columns(
        self, device: CaptureDevice, step: Sample, ordinary: Sample
    ) -> TraceColumns:
        """Return a step as a body without a prologue, as if it followed an ordinary step."""
        return self._columns(device, 0, step, [step], before=ordinary)

    def columns_so_far(self, device: CaptureDevice) -> TraceColumns:
        """Return all nodes as a prologue, with an empty body."""
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
        """Return the first nodes as a prologue, and ``body`` with the durations of ``samples``.

        All steps before the body are taken to be like ``before``.
        """
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
        """Return the predecessors of node ``i`` of a body, as positions from the body's beginning.

        A position below 0 lies in an earlier step; all of these are like ``before``.
        """
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
        """Return where ``pred`` lies before ``start`` if all earlier steps are like ``before``.

        It lies as many places back on its lane. None if ``before`` has no node on that lane.
        """
        lane = self.nodes[pred].lane
        back = sum(self.nodes[x].lane == lane for x in range(pred, start))
        own = [x for x in range(before.start, before.stop) if self.nodes[x].lane == lane]
        if not own:
            return None
        steps, rest = divmod(back - 1, len(own))
        return own[-1 - rest] - before.stop - steps * (before.stop - before.start)

    def steady_spans(self, device: CaptureDevice, samples: Sequence[Sample]) -> Spans:
        """Return the computation of some equal steps, on a device whose marks are times."""
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
        # The delay until the program ran again counts for the computation that waited.
        late_ns = max((self._ends.get(pred, (0, 0))[1] for pred in node.preds), default=0)
        return max(0, self._own_ns(device, i)) + late_ns

    def _own_ns(self, device: CaptureDevice, i: int) -> int:
        """Return the duration of computation ``i`` without the waiting time in it."""
        node = self.nodes[i]
        return device.elapsed_ns(node.began, node.ended) - self._left_out_ns[i]
