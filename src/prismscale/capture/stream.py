"""What a rank does, as it happens: nodes in program order, with marks in place of durations.

Shared by capture (which turns the stream into a :class:`RankTrace`) and by nothing else: a live
rank only counts communications.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from prismscale.capture.device.protocol import CaptureDevice, Mark
from prismscale.errors import UsageError
from prismscale.graph.builder import Names, TraceBuilder
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import GroupRecord, MemoryRecord, RankTrace


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


class NodeStream:
    """Nodes in program order and the places where steps may end."""

    def __init__(self) -> None:
        self.nodes: list[StreamNode] = []
        self.marks: list[int] = []
        """Stream length at each optimizer call's end."""
        self.signatures: list[str] = []
        """What lies between consecutive marks: equal text, equal structure."""
        self.lanes = Names(["host"])
        self.labels = Names([""])
        self.sites = Names()

    def append(self, node: StreamNode) -> int:
        """Add a node; returns its position."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def took(self, positions: Sequence[int], ns: int) -> None:
        """This rank's share of a batch of communications took so long."""
        for position in positions:
            self.nodes[position].took_ns = ns

    def mark(self) -> None:
        """An optimizer call ended here."""
        start = self.marks[-1] if self.marks else 0
        self.marks.append(len(self.nodes))
        self.signatures.append(self._signature(start, len(self.nodes)))

    def _signature(self, start: int, stop: int) -> str:
        digest = hashlib.sha256()
        for i in range(start, stop):
            node = self.nodes[i]
            distances = tuple(i - p for p in node.preds)
            # bytes of all_to_all follow the routing of the moment: not a change of structure
            n_bytes = node.n_bytes if node.op.bytes_must_agree or node.op.is_p2p else 0
            digest.update(
                repr(
                    (int(node.kind), int(node.op), node.role, node.peer, n_bytes, distances)
                ).encode()
            )
        return digest.hexdigest()

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
        starts = [self.marks[-1 - period * (k + 1)] for k in range(samples)][::-1]
        n_body = self.marks[-1] - starts[-1]
        builder = TraceBuilder(rank=rank, world_size=world_size, groups=groups)
        builder.lanes, builder.labels, builder.sites = self.lanes, self.labels, self.sites
        for i in range(starts[0]):
            self._emit(builder, i, [self._duration_ns(device, i)], 0)
        builder.begin_body()
        for j in range(n_body):
            durations = [self._duration_ns(device, s + j) for s in starts]
            # The last sample's edges: its predecessors may lie in the sample before it.
            self._emit(builder, starts[-1] + j, durations, starts[-1] - starts[0])
        return builder.build(known_groups=known_groups, memory=memory, meta=meta)

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
        return max(0, device.elapsed_ns(node.began, node.ended))
