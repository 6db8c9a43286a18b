"""Writes ranks of a re-timed job as Chakra execution traces, one file a rank, with start times.

Each file holds the last simulated step: ``<prefix>.<rank>.et``, and beside them ``comm_group.json``
(group name → ranks) as ASTRA-sim reads it. Chakra counts microseconds; the attributes
``start_time_ns`` and ``duration_ns`` keep what that rounding loses. ``earlier_step_distances``
holds edges that cross the step's border (in nodes back), and the metadata lists the groups of the
rank by group index, so that a job can be read back as it was.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prismscale.durations.source import Duration, DurationSource
from prismscale.errors import UsageError
from prismscale.files import atomic_write
from prismscale.formats.chakra.protobuf import (
    SCHEMA_VERSION,
    CommType,
    GlobalMetadata,
    Node,
    NodeType,
    attribute,
    write_message,
)
from prismscale.graph.channels import ChannelKey, ClassChannels, classes_of
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import HOST
from prismscale.sim.timeline import RankTimeline, Timeline

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

GROUPS_FILE = "comm_group.json"
"""Beside the traces: group name → ranks."""

Use = tuple[ChannelKey, int]
"""The n-th use of a channel within a step."""


def write_chakra(
    graph: JobGraph,
    timeline: Timeline,
    durations: DurationSource,
    folder: Path,
    *,
    prefix: str = "trace",
) -> list[Path]:
    """Write every rank whose nodes the timeline holds (``simulate(…, ranks=…)``).

    Args:
        graph: the job.
        timeline: the re-timed job; its last step is written.
        durations: the durations it was re-timed with.
        folder: made where it is missing.
        prefix: of the file names.

    Raises:
        UsageError: the timeline holds no rank's nodes.
        StorageError: a file cannot be written.
    """
    if not timeline.ranks:
        raise UsageError("the timeline holds no rank's nodes; simulate with ranks=…")
    step = timeline.step_end_ns_TDR.shape[0] - 1
    spoken = _spoken(graph, durations, step)
    groups: dict[str, list[int]] = {}
    paths = []
    for rank, rows in sorted(timeline.ranks.items()):
        export = _RankExport(graph, rank, rows, durations.body(rows.class_index, step), spoken)
        groups |= {g["name"]: g["ranks"] for g in export.groups}
        path = folder / f"{prefix}.{rank}.et"
        with atomic_write(path) as file:
            write_message(file, export.metadata())
            for message in export.nodes(step):
                write_message(file, message)
        paths.append(path)
    with atomic_write(folder / GROUPS_FILE) as file:
        file.write(json.dumps(groups).encode())
    return paths


def _spoken(graph: JobGraph, durations: DurationSource, step: int) -> dict[Use, Duration]:
    """The duration of every communication, as its speaker tells it."""
    found: dict[Use, Duration] = {}
    for rank_class in graph.classes:
        body = durations.body(rank_class.index, step)
        for node, use in _uses(graph, rank_class).items():
            is_speaker = (
                rank_class.trace.kind_N[node] == NodeKind.SEND
                if use[0].is_p2p
                else classes_of(graph, use[0])[0] == rank_class.index
            )
            if is_speaker:
                found[use] = body[node - rank_class.trace.n_prologue]
    return found


def _uses(graph: JobGraph, rank_class: RankClass) -> dict[int, Use]:
    """By node: which use of which channel it is within a step."""
    counts: Counter[ChannelKey] = Counter()
    found: dict[int, Use] = {}
    trace, channels = rank_class.trace, ClassChannels(graph, rank_class)
    for node in trace.communications(trace.n_prologue, trace.n_nodes):
        key = channels.of(node)
        found[node] = (key, counts[key])
        counts[key] += 1
    return found


class _RankExport:
    """One rank's messages."""

    def __init__(
        self,
        graph: JobGraph,
        rank: int,
        rows: RankTimeline,
        body: Sequence[Duration],
        spoken: Mapping[Use, Duration],
    ) -> None:
        self._graph = graph
        self._rank = rank
        self._rows = rows
        self._class = graph.classes[rows.class_index]
        self._member = int(graph.member_of_R[rank])
        self._body = body
        self._spoken = spoken
        self._uses = _uses(graph, self._class)
        self.groups = [self._group(group_index) for group_index in range(len(self._class.slots))]

    def _group(self, group_index: int) -> dict[str, Any]:
        slot = self._class.slots[group_index]
        family, column = self._graph.families[slot.family], int(slot.group_M[self._member])
        return {
            "name": f"{family.index}.{column}",
            "desc": self._class.trace.groups[group_index].name,
            "ranks": family.ranks_KG[:, column].tolist(),
        }

    def metadata(self) -> Any:
        """The first message of the file."""
        attributes: dict[str, bool | int | str | list[int]] = {
            "rank": self._rank,
            "world_size": self._graph.world_size,
            "process_groups": json.dumps(self.groups),
        }
        return GlobalMetadata(
            version=SCHEMA_VERSION, attr=[attribute(k, v) for k, v in attributes.items()]
        )

    def nodes(self, step: int) -> Iterator[Any]:
        """The nodes of the step in program order; a node's id is its place in the body."""
        trace = self._class.trace
        first_row = trace.n_prologue + step * trace.n_body - self._rows.first_position
        for node in range(trace.n_body):
            yield self._message(node, int(self._rows.start_ns_N[first_row + node]))

    def _message(self, node: int, start_ns: int) -> Any:
        trace = self._class.trace
        i = trace.n_prologue + node
        sources = [node - int(d) for d in trace.predecessors(i)]
        duration_ns = self._duration_ns(node)
        attributes: dict[str, bool | int | str | list[int]] = {
            "is_cpu_op": trace.lanes[int(trace.lane_N[i])] == HOST,
            "start_time_ns": start_ns,
            "duration_ns": duration_ns,
            "lane": trace.lanes[int(trace.lane_N[i])],
            "earlier_step_distances": [node - s for s in sources if s < 0],
        }
        if trace.kind_N[i] != NodeKind.COMPUTE:
            attributes |= self._communication(i)
        return Node(
            id=node,
            name=trace.labels[int(trace.label_N[i])],
            type=NODE_TYPE[NodeKind(int(trace.kind_N[i]))],
            data_deps=[s for s in sources if s >= 0],
            start_time_micros=start_ns // 1000,
            duration_micros=duration_ns // 1000,
            attr=[attribute(k, v) for k, v in attributes.items()],
        )

    def _communication(self, i: int) -> dict[str, bool | int | str | list[int]]:
        trace = self._class.trace
        group_index, op = int(trace.group_index_N[i]), CollectiveOp(int(trace.op_N[i]))
        group = self.groups[group_index]
        found: dict[str, bool | int | str | list[int]] = {
            "pg_name": group["name"],
            "comm_size": int(trace.bytes_N[i]),
        }
        peer = int(trace.peer_N[i])
        if op.is_p2p:
            ranks = group["ranks"]
            other = ranks[(ranks.index(self._rank) + peer) % len(ranks)]
            ends = (self._rank, other) if op is CollectiveOp.SEND else (other, self._rank)
            return {**found, "comm_src": ends[0], "comm_dst": ends[1], "comm_tag": 0}
        found["comm_type"] = int(COMM_TYPE[op])
        return {**found, "root": peer} if peer >= 0 else found

    def _duration_ns(self, node: int) -> int:
        i = self._class.trace.n_prologue + node
        if i not in self._uses:
            return _pick(self._body[node], self._member)
        key = self._uses[i]
        group_index = int(self._class.trace.group_index_N[i])
        column = int(self._class.slots[group_index].group_M[self._member])
        return _pick(self._spoken[key], column)


def _pick(duration: Duration, column: int) -> int:
    """One member's or group's value, of the first draw."""
    values = np.asarray(duration)
    if values.ndim == 0:
        return int(values)
    row = values.reshape(-1, values.shape[-1])[0]
    return int(row[column] if len(row) > 1 else row[0])
