"""Makes the messages of a rank class once, and again only where a rank's times or groups differ.

[Note: one node a lane] Readers run the nodes of a lane one after the other. Work and its launch
path are two nodes side by side on one lane (:mod:`prismscale.graph.launch_paths`), so they become
one node. It lasts from the end of its last dependency to the later of both ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismscale.formats.chakra.protobuf import CommType, Node, NodeType, attribute, framed
from prismscale.graph.job_graph import RankClass
from prismscale.graph.launch_paths import work_beside_N
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import HOST, RankTrace
from prismscale.sim.timeline import RankTimeline

NODE_TYPE = {
    NodeKind.COMPUTE: NodeType.COMP_NODE,
    NodeKind.COLLECTIVE: NodeType.COMM_COLL_NODE,
    NodeKind.SEND: NodeType.COMM_SEND_NODE,
    NodeKind.RECV: NodeType.COMM_RECV_NODE,
}
COMM_TYPE = {
    CollectiveOp.ALL_REDUCE: CommType.ALL_REDUCE,
    CollectiveOp.REDUCE: CommType.REDUCE,
    CollectiveOp.ALL_GATHER: CommType.ALL_GATHER,
    CollectiveOp.GATHER: CommType.GATHER,
    CollectiveOp.SCATTER: CommType.SCATTER,
    CollectiveOp.BROADCAST: CommType.BROADCAST,
    CollectiveOp.ALL_TO_ALL: CommType.ALL_TO_ALL,
    CollectiveOp.REDUCE_SCATTER: CommType.REDUCE_SCATTER,
    CollectiveOp.BARRIER: CommType.BARRIER,
    CollectiveOp.SYMM_MEM_BARRIER: CommType.BARRIER,
}
PART_IS_SIZE = (CollectiveOp.ALL_GATHER, CollectiveOp.GATHER)
"""Operations whose ``comm_size`` is the input of one member. Our bytes are those of the whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupUse:
    """A group of a rank, with the name that messages use."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ExportedClass:
    """One class's body as Chakra nodes."""

    rank_class: RankClass

    @property
    def trace(self) -> RankTrace:
        """The trace that all ranks of the class run."""
        return self.rank_class.trace

    @cached_property
    def kept(self) -> NDArray[np.int64]:
        """Body nodes that become messages."""
        beside = work_beside_N(self.trace)[self.trace.n_prologue :] - self.trace.n_prologue
        return np.flatnonzero(beside == np.arange(self.trace.n_body))

    @cached_property
    def id_of(self) -> list[int]:
        """By body node: id of the message that stands for it."""
        beside = work_beside_N(self.trace)[self.trace.n_prologue :] - self.trace.n_prologue
        return np.searchsorted(self.kept, beside).tolist()

    @cached_property
    def _made(self) -> dict[tuple[Any, ...], bytes]:
        return {}

    def messages(
        self,
        rank: int,
        rows: RankTimeline,
        first_row: int,
        duration_ns: list[int],
        groups: list[GroupUse],
    ) -> Iterator[bytes]:
        """Yield the framed messages of one rank.

        Args:
            rank: a member of the class.
            rows: the rank's timeline.
            first_row: row at which the step begins.
            duration_ns: duration of every body node.
            groups: the rank's groups, by group index.
        """
        starts = rows.start_ns_N[first_row : first_row + self.trace.n_body].tolist()
        ends = rows.end_ns_N[first_row : first_row + self.trace.n_body]
        for n, is_both, group, is_p2p in self._plan:
            if is_both:
                start, duration = self._spanned(n, rows, first_row, ends)
            else:
                start, duration = starts[n], duration_ns[n]
            # All of a message that differs between ranks: times, group, and own rank if p2p.
            key = (n, start, duration, groups[group].name if group >= 0 else "", rank * is_p2p)
            made = self._made.get(key)
            if made is None:
                made = framed(self._message(n, start, duration, rank, groups))
                # No other rank has the same point-to-point message.
                if not is_p2p:
                    self._made[key] = made
            yield made

    @cached_property
    def _plan(self) -> list[tuple[int, bool, int, bool]]:
        """The facts about each message that all ranks share.

        They are its body node, whether a launch path belongs to it, its group index (-1 for
        computation), and whether it is point-to-point.
        """
        trace = self.trace
        nodes = trace.n_prologue + self.kept
        groups = np.where(trace.communicates_N[nodes], trace.group_index_N[nodes], -1).tolist()
        is_p2p = trace.is_message_N[nodes].tolist()
        both = [self._both(n) for n in self.kept.tolist()]
        return list(zip(self.kept.tolist(), both, groups, is_p2p, strict=True))

    def _both(self, n: int) -> bool:
        """Whether a launch path belongs to body node ``n``."""
        return n + 1 < self.trace.n_body and self.id_of[n + 1] == self.id_of[n]

    def _spanned(
        self, n: int, rows: RankTimeline, first_row: int, ends: NDArray[np.int64]
    ) -> tuple[int, int]:
        """Return start and duration of work and launch path together."""
        trace = self.trace
        last = [
            int(rows.end_ns_N[first_row + m - d])
            for m in (n, n + 1)
            for d in trace.predecessors(trace.n_prologue + m).tolist()
            if first_row + m - d >= 0 and m - d not in (n, n + 1)
        ]
        end = int(max(ends[n], ends[n + 1]))
        start = max(last, default=int(rows.start_ns_N[first_row + n]))
        return start, max(end - start, 0)

    def _sources(self, n: int) -> list[int]:
        """Return ids of the messages that body node ``n`` depends on; below 0 in earlier steps."""
        trace, own = self.trace, [n, n + 1] if self._both(n) else [n]
        found = []
        for m in own:
            for distance in trace.predecessors(trace.n_prologue + m).tolist():
                steps, source = divmod(m - distance, trace.n_body)
                found.append(self.id_of[source] + steps * len(self.kept))
        return [s for s in dict.fromkeys(found) if s != self.id_of[n]]

    def _message(
        self, n: int, start_ns: int, duration_ns: int, rank: int, groups: list[GroupUse]
    ) -> Any:
        trace, i, own = self.trace, self.trace.n_prologue + n, self.id_of[n]
        sources = self._sources(n)
        lane = trace.lanes[int(trace.lane_N[i])]
        attributes: dict[str, bool | int | str | list[int]] = {
            "is_cpu_op": lane == HOST,
            "start_time_ns": start_ns,
            "duration_ns": duration_ns,
            "lane": lane,
            "earlier_step_distances": [own - s for s in sources if s < 0],
        }
        if trace.kind_N[i] != NodeKind.COMPUTE:
            attributes |= self._communication(i, rank, groups)
        return Node(
            id=own,
            name=trace.labels[int(trace.label_N[i])],
            type=NODE_TYPE[NodeKind(int(trace.kind_N[i]))],
            data_deps=[s for s in sources if s >= 0],
            start_time_micros=start_ns // 1000,
            duration_micros=duration_ns // 1000,
            attr=[attribute(k, v) for k, v in attributes.items()],
        )

    def _communication(
        self, i: int, rank: int, groups: list[GroupUse]
    ) -> dict[str, bool | int | str | list[int]]:
        trace, op = self.trace, CollectiveOp(int(self.trace.op_N[i]))
        group, n_bytes = groups[int(trace.group_index_N[i])], int(trace.bytes_N[i])
        found: dict[str, bool | int | str | list[int]] = {
            "pg_name": group.name,
            "comm_size": n_bytes // len(group.ranks) if op in PART_IS_SIZE else n_bytes,
            "whole_bytes": n_bytes,
        }
        peer = int(trace.peer_N[i])
        if op.is_p2p:
            other = group.ranks[(group.ranks.index(rank) + peer) % len(group.ranks)]
            ends = (rank, other) if op is CollectiveOp.SEND else (other, rank)
            tag = peer // len(group.ranks)
            return {**found, "comm_src": ends[0], "comm_dst": ends[1], "comm_tag": tag}
        found["comm_type"] = int(COMM_TYPE[op])
        return {**found, "root": peer} if peer >= 0 else found
