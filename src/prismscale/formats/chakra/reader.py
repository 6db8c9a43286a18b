"""Reads Chakra execution traces, ours or others', one file a rank, into a job's graph.

The format has no groups of its own. They come from the metadata of our files, or from a
``comm_group.json`` beside the traces (as for ASTRA-sim). A node that names no group communicates
among the whole job. A communication lasts as long as the quickest of its members recorded; what
other members recorded beyond that is waiting.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from prismscale.errors import FormatError, shown
from prismscale.foreign import reading
from prismscale.formats.chakra.exported_class import COMM_TYPE, PART_IS_SIZE
from prismscale.formats.chakra.protobuf import CommType, NodeType, attributes, read_messages
from prismscale.formats.chakra.writer import GROUPS_FILE
from prismscale.graph.assembly.assemble import assemble
from prismscale.graph.assembly.groups import GroupTable
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import MOST_TAGS, CollectiveOp
from prismscale.graph.trace import HOST, LONGEST_NS, GroupRecord, RankTrace
from prismscale.graph.verify import verify
from prismscale.typed_files import LARGEST_INT, parse_json, read_json

OPERATION = {comm_type: op for op, comm_type in COMM_TYPE.items()} | {
    CommType.REDUCE_SCATTER_BLOCK: CollectiveOp.REDUCE_SCATTER,
    # Barriers of symmetric memory are exported as the same.
    CommType.BARRIER: CollectiveOp.BARRIER,
}
P2P = {
    NodeType.COMM_SEND_NODE: CollectiveOp.SEND,
    NodeType.COMM_RECV_NODE: CollectiveOp.RECV,
}
WORLD = ""
"""Name of the group of all ranks."""


@dataclass(kw_only=True, slots=True)
class _ChakraNode:
    """One node of a file."""

    name: str
    kind: int
    deps: list[int]
    earlier: list[int]
    """Distances back to nodes of earlier steps."""
    duration_ns: int
    attrs: Mapping[str, Any]


@dataclass(kw_only=True)
class _File:
    """One rank's file."""

    path: Path
    rank: int
    groups: dict[str, GroupRecord] = field(default_factory=dict)
    """By the name that nodes use; in order of group index if the file lists them."""
    nodes: dict[int, _ChakraNode] = field(default_factory=dict)

    def order(self) -> list[int]:
        """Return node ids such that dependencies come first, by id where they leave a choice.

        Raises:
            FormatError: a dependency is not in the file, or dependencies form a circle.
        """
        waiting = {i: len(set(n.deps)) for i, n in self.nodes.items()}
        after: dict[int, list[int]] = defaultdict(list)
        for i, node in self.nodes.items():
            for dep in set(node.deps):
                if dep not in self.nodes:
                    raise FormatError(f"{self.path}: node {i} depends on {dep}, which is not there")
                after[dep].append(i)
        ready = [i for i, n in waiting.items() if n == 0]
        heapq.heapify(ready)
        ordered: list[int] = []
        while ready:
            i = heapq.heappop(ready)
            ordered.append(i)
            for later in after[i]:
                waiting[later] -= 1
                if waiting[later] == 0:
                    heapq.heappush(ready, later)
        if len(ordered) < len(self.nodes):
            raise FormatError(f"{self.path}: nodes depend on each other in a circle")
        return ordered


def read_chakra(files: Sequence[Path]) -> JobGraph:
    """Read a job, one file for each of its ranks.

    Args:
        files: ``<anything>.<rank>.et``.

    Raises:
        FormatError: a file is damaged, foreign or missing.
        GraphError: members of a group disagree about a communication.
    """
    with reading(_named(files), "a Chakra trace"):
        return _job(sorted((_read(path) for path in files), key=lambda f: f.rank))


def _named(files: Sequence[Path]) -> str:
    """Return how error messages name the files."""
    return str(files[0]) if len(files) == 1 else f"one of {len(files)} files such as {files[0]}"


def _job(ranks: Sequence[_File]) -> JobGraph:
    if [f.rank for f in ranks] != list(range(len(ranks))):
        raise FormatError(
            f"files for ranks {[f.rank for f in ranks][:16]} were given; every rank from 0 on is "
            "needed once, because communication needs all its members"
        )
    groups = _group_table(ranks)
    _take_out_waiting(ranks)
    traces = {f.rank: _trace(f, groups) for f in ranks}
    representative_R = _twins(traces)
    graph = assemble(traces, representative_R, groups, meta={"source": "chakra"})
    verify(graph)
    return graph


def _read(path: Path) -> _File:
    try:
        with path.open("rb") as stream:
            messages = read_messages(str(path), stream)
            metadata = attributes(next(messages))
            file = _File(path=path, rank=_rank(path, metadata), groups=_groups(path, metadata))
            for message in messages:
                if message.id in file.nodes:
                    raise FormatError(f"{path}: node {message.id} appears twice")
                file.nodes[message.id] = _node(path, message)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from error
    return file


def _rank(path: Path, metadata: Mapping[str, Any]) -> int:
    if isinstance(metadata.get("rank"), int):
        return int(metadata["rank"])
    found = re.search(r"\.(\d+)\.et$", path.name)
    if found is None:
        raise FormatError(f"{path}: no rank; name Chakra files <prefix>.<rank>.et")
    return int(found.group(1))


def _groups(path: Path, metadata: Mapping[str, Any]) -> dict[str, GroupRecord]:
    beside = path.with_name(GROUPS_FILE)
    try:
        if "process_groups" in metadata:
            listed = parse_json(metadata["process_groups"], f"{path}: process groups")
            return {
                str(g["name"]): GroupRecord(ranks=_ranks(g["ranks"]), name=str(g["desc"]))
                for g in listed
            }
        if beside.exists():
            table = read_json(beside)
            return {str(k): GroupRecord(ranks=_ranks(v), name=str(k)) for k, v in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{path}: process groups cannot be read ({shown(str(error))})") from error
    return {}


def _ranks(value: Any) -> tuple[int, ...]:
    ranks = tuple(int(r) for r in value)
    if not ranks or min(ranks) < 0 or len(set(ranks)) != len(ranks):
        raise ValueError(f"{shown(value)} is no list of different ranks")
    return ranks


def _node(path: Path, message: Any) -> _ChakraNode:
    attrs = attributes(message)
    if message.type == NodeType.INVALID_NODE:
        raise FormatError(f"{path}: node {message.id} '{message.name}' has no type")
    duration_ns = attrs.get("duration_ns", message.duration_micros * 1000)
    earlier = attrs.get("earlier_step_distances", [])
    if not isinstance(duration_ns, int) or not 0 <= duration_ns < LONGEST_NS:
        raise FormatError(f"{path}: node {message.id} lasts {shown(duration_ns)} ns")
    if not isinstance(earlier, list):
        raise FormatError(f"{path}: node {message.id} has earlier_step_distances {shown(earlier)}")
    return _ChakraNode(
        name=message.name,
        kind=message.type,
        deps=[*message.data_deps, *message.ctrl_deps],
        earlier=[d for d in earlier if isinstance(d, int) and d > 0],
        duration_ns=duration_ns,
        attrs=attrs,
    )


def _group_table(files: Sequence[_File]) -> GroupTable:
    """Return the groups of all ranks: the world, then the others in the order of the files."""
    world = tuple(range(len(files)))
    known: dict[str, GroupRecord] = {}
    for file in files:
        for name, record in file.groups.items():
            if known.setdefault(name, record).ranks != record.ranks:
                raise FormatError(f"{file.path}: group {name} has other ranks than in other files")
            if record.ranks[-1] >= len(files) or max(record.ranks) >= len(files):
                raise FormatError(f"{file.path}: group {name} has ranks for which no file is given")
    if not any(r.ranks == world for r in known.values()):
        known = {WORLD: GroupRecord(ranks=world), **known}
    names = sorted(known, key=lambda name: known[name].ranks != world)
    records = [known[name] for name in names]
    return GroupTable(
        ranks=tuple(r.ranks for r in records),
        names=tuple(names),
        groups_R=tuple(tuple(g for g, r in enumerate(records) if k in r.ranks) for k in world),
        positions_R=tuple(tuple(r.ranks.index(k) for r in records if k in r.ranks) for k in world),
    )


def _trace(file: _File, groups: GroupTable) -> RankTrace:
    own = groups.of_rank(file.rank)
    described = [
        GroupRecord(
            ranks=groups.ranks[g],
            name=file.groups[groups.names[g]].name if groups.names[g] in file.groups else "",
        )
        for g in own
    ]
    index_of = {groups.names[g]: group_index for group_index, g in enumerate(own)}
    builder = TraceBuilder(rank=file.rank, world_size=len(groups.groups_R), groups=described)
    builder.begin_body()
    order = file.order()
    position = {i: p for p, i in enumerate(order)}
    for i in order:
        node = file.nodes[i]
        preds = [position[dep] for dep in dict.fromkeys(node.deps)]
        preds += [position[i] - distance for distance in node.earlier]
        lane = str(node.attrs.get("lane", HOST if node.attrs.get("is_cpu_op") else "device"))
        op = _operation(file.path, i, node)
        if op is None:
            builder.add_compute(node.duration_ns, preds=preds, label=node.name, lane=lane)
            continue
        group_index = _group_index(file.path, i, node, index_of)
        builder.add_communication(
            op,
            _n_bytes(file.path, i, node, op, len(described[group_index].ranks)),
            group_index=group_index,
            peer=_peer(file, i, node, op, described[group_index].ranks),
            tag=_tag(node) if op.is_p2p else 0,
            preds=preds,
            durations_ns=node.duration_ns,
            label=node.name,
            lane=lane,
        )
    return builder.build()


def _n_bytes(path: Path, i: int, node: _ChakraNode, op: CollectiveOp, group_size: int) -> int:
    """Return the bytes of the whole.

    ``comm_size`` of an all-gather or gather is the input of one member, so it is multiplied.
    """
    n_bytes = node.attrs.get("whole_bytes", node.attrs.get("comm_size", 0))
    if not isinstance(n_bytes, int) or not 0 <= n_bytes <= LARGEST_INT // group_size:
        raise FormatError(f"{path}: node {i} has comm_size {shown(n_bytes)}")
    is_part = op in PART_IS_SIZE and "whole_bytes" not in node.attrs
    return n_bytes * group_size if is_part else n_bytes


def _take_out_waiting(files: Sequence[_File]) -> None:
    """Give all members of a communication one duration, the shortest that any of them recorded.

    Members meet at the n-th collective of a group, or the n-th message from one rank to another
    with one tag.
    """
    uses: dict[tuple[str, Any, Any, int], list[list[_ChakraNode]]] = defaultdict(list)
    for file in files:
        counts: Counter[tuple[str, Any, Any, int]] = Counter()
        for i in file.order():
            node = file.nodes[i]
            if node.kind not in P2P and node.kind != NodeType.COMM_COLL_NODE:
                continue
            ends = (node.attrs.get("comm_src"), node.attrs.get("comm_dst"), _tag(node))
            path = ends if node.kind in P2P else (-1, -1, 0)
            key = (str(node.attrs.get("pg_name", WORLD)), *path)
            if counts[key] == len(uses[key]):
                uses[key].append([])
            uses[key][counts[key]].append(node)
            counts[key] += 1
    for met in uses.values():
        for nodes in met:
            own_ns = min(n.duration_ns for n in nodes)
            for node in nodes:
                node.duration_ns = own_ns


def _tag(node: _ChakraNode) -> int:
    tag = node.attrs.get("comm_tag", 0)
    return tag % MOST_TAGS if isinstance(tag, int) else 0


def _operation(path: Path, i: int, node: _ChakraNode) -> CollectiveOp | None:
    if node.kind in P2P:
        return P2P[NodeType(node.kind)]
    if node.kind != NodeType.COMM_COLL_NODE:
        return None
    comm_type = node.attrs.get("comm_type")
    if not isinstance(comm_type, int) or comm_type not in OPERATION:
        raise FormatError(f"{path}: node {i} has comm_type {shown(comm_type)}; known are 0 … 9")
    return OPERATION[CommType(comm_type)]


def _group_index(path: Path, i: int, node: _ChakraNode, index_of: Mapping[str, int]) -> int:
    name = str(node.attrs.get("pg_name", WORLD))
    if name == WORLD:
        return 0
    if name not in index_of:
        raise FormatError(
            f"{path}: node {i} communicates in group '{name}', which is unknown or does not hold "
            f"this rank; list the ranks of all groups in {GROUPS_FILE} beside the traces"
        )
    return index_of[name]


def _peer(file: _File, i: int, node: _ChakraNode, op: CollectiveOp, ranks: tuple[int, ...]) -> int:
    if not op.is_p2p:
        root = node.attrs.get("root", -1)
        return int(root) if isinstance(root, int) else -1
    other = node.attrs.get("comm_dst" if op is CollectiveOp.SEND else "comm_src")
    if other not in ranks or other == file.rank:
        raise FormatError(
            f"{file.path}: node {i} has peer {shown(other)}, which is not in its group"
        )
    return ranks.index(other) - ranks.index(file.rank)


def _twins(traces: Mapping[int, RankTrace]) -> Any:
    """Return, for every rank, the first rank with the same program and the same durations."""
    first: dict[tuple[str, bytes], int] = {}
    return np.array(
        [
            first.setdefault((t.fingerprint(), t.body_ns_SB.tobytes()), rank)
            for rank, t in sorted(traces.items())
        ],
        dtype=np.int64,
    )
