"""The trace of one captured rank: :class:`RankTrace`.

A trace is a program, not a timeline. It has a *prologue* (everything before the program reaches its
steady state) and a *body* (one steady step), which repeats for ever. Nodes are numbered by their
position in the unrolled stream ``prologue, body, body, …``. A predecessor is stored as the
*distance* back in that stream, so an edge that crosses a step boundary is an ordinary edge.

Array axes: ``N`` nodes (prologue, then one body), ``P`` predecessor entries, ``S`` sampled steps,
``B`` body nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import GraphError
from prismscale.graph.facts import CaptureFacts
from prismscale.graph.node import CollectiveOp, NodeKind

LONGEST_NS = 2**56
"""Upper limit for a node's duration in a file: two years. Sums of such durations stay below
:data:`prismscale.durations.source.NEVER`."""
HOST = "host"
"""Name of the host lane."""
NO_FACTS = CaptureFacts()
NO_GROUP = -1
"""``group_index`` of a node that is not a communication."""
PROGRAM_COLUMNS = ("kind_N", "op_N", "lane_N", "group_index_N", "peer_N", "bytes_N")
"""The part of :data:`NODE_COLUMNS` that says what a node does, without call site and label."""
NODE_COLUMNS = (*PROGRAM_COLUMNS, "site_N", "label_N")
"""Fields of a trace that hold one value per node. Edges and durations are stored separately."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """One process group as a program created it. Two groups may hold the same ranks."""

    ranks: tuple[int, ...]
    """Global ranks in group order: position in this tuple is the group rank."""
    name: str = ""
    """The program's name for it (mesh axis or ``group_desc``); empty if it gave none."""
    backend: str = ""
    """The backend the program asked for, for example ``nccl``."""
    within: int | None = None
    """None for a group that the program created. For a group that the assembler added for messages:
    the group index of the larger group in which the program sends these messages
    (:mod:`prismscale.graph.assembly.narrowed`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPart:
    """Device memory held by one user other than the allocator."""

    name: str
    n_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRecord:
    """Device memory of one rank, in bytes."""

    peak_bytes: int
    """Highest allocated bytes from the start of the program to the last tracked step."""
    peak_step: int
    """Step in which the peak occurs; -1 means before the first step."""
    step_peak_bytes: tuple[int, ...] = ()
    """Highest allocated bytes within each tracked step."""
    reserved_bytes: int | None = None
    """Highest bytes reserved by the caching allocator; None if the device has none."""
    outside: tuple[MemoryPart, ...] = ()
    """Memory held outside the allocator at the end, if it is modelled; largest part first."""
    source: str = "measured"
    """``measured`` (by the device's allocator) or ``modelled``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceColumns:
    """Nodes, edges and durations of a program: the part of a trace that does not name the rank."""

    n_prologue: int
    kind_N: NDArray[np.uint8]
    op_N: NDArray[np.uint8]
    """:class:`CollectiveOp` of communications; 0 for COMPUTE."""
    lane_N: NDArray[np.int16]
    """Index into :attr:`lanes`: the host or a device stream. For display, and to tell which
    computation ends a step; dependencies follow from edges alone."""
    group_index_N: NDArray[np.int16]
    peer_N: NDArray[np.int32]
    """SEND/RECV: the peer's group rank minus ours, modulo group size, plus group size times the
    message's tag. Rooted collectives: the root's group rank. Otherwise -1."""
    bytes_N: NDArray[np.int64]
    site_N: NDArray[np.int32]
    """Index into :attr:`sites`: the call site in the user's program; -1 if unknown."""
    label_N: NDArray[np.int32]
    """Index into :attr:`labels`: the node's name on a timeline."""
    pred_start_N1: NDArray[np.int32]
    """Row pointers (length N + 1) into :attr:`pred_distance_P`."""
    pred_distance_P: NDArray[np.int32]
    """Distance back to each predecessor, at least 1."""
    prologue_ns: NDArray[np.int64]
    """Durations of prologue nodes. A communication has 0 unless it was measured."""
    body_ns_SB: NDArray[np.int64]
    """Durations of body nodes in each sampled step. A communication's duration is the time after
    its last arrival, or 0 if a model has to provide it."""
    lanes: tuple[str, ...] = (HOST,)
    labels: tuple[str, ...] = ("",)
    sites: tuple[str, ...] = ()

    def by_name(self) -> dict[str, Any]:
        """Every column by field name, as keyword arguments for a :class:`RankTrace`."""
        return {field.name: getattr(self, field.name) for field in fields(TraceColumns)}

    @property
    def n_nodes(self) -> int:
        """Number of stored nodes: the prologue and one body."""
        return len(self.kind_N)

    @property
    def is_message_N(self) -> NDArray[np.bool_]:
        """True for nodes that are sends or receives."""
        is_message: NDArray[np.bool_]
        is_message = (self.kind_N == NodeKind.SEND) | (self.kind_N == NodeKind.RECV)
        return is_message


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace(TraceColumns):
    """The program of one captured rank, with the durations of its computation."""

    rank: int
    world_size: int
    groups: tuple[GroupRecord, ...]
    """The groups this rank belongs to, by *group index* (creation order); group index 0 is the
    whole world. In a graph, groups that the assembler added for messages come last."""
    known_groups: tuple[GroupRecord, ...]
    """Every group whose creation this rank saw, its own and others, in creation order."""
    memory: MemoryRecord | None = None
    facts: CaptureFacts = NO_FACTS

    def __post_init__(self) -> None:
        n = self.n_nodes
        if any(len(getattr(self, name)) != n for name in NODE_COLUMNS):
            raise GraphError(f"rank {self.rank}: trace columns differ in length from {n} nodes")
        if len(self.pred_start_N1) != n + 1 or self.pred_start_N1[-1] != len(self.pred_distance_P):
            raise GraphError(f"rank {self.rank}: predecessor table does not fit {n} nodes")
        if not 0 <= self.n_prologue <= n or len(self.prologue_ns) != self.n_prologue:
            raise GraphError(f"rank {self.rank}: prologue of {self.n_prologue} in {n} nodes")
        if self.body_ns_SB.ndim != 2 or self.body_ns_SB.shape[1] != self.n_body:
            raise GraphError(
                f"rank {self.rank}: durations {self.body_ns_SB.shape} for {self.n_body} body nodes"
            )

    @property
    def captured_as(self) -> int:
        """Captured rank whose steps these are: this one, unless it was found equal to another."""
        did = self.facts.equivalent_to
        return self.rank if did is None else did

    @property
    def n_body(self) -> int:
        """Number of nodes in one steady step."""
        return self.n_nodes - self.n_prologue

    @property
    def n_samples(self) -> int:
        """Number of steps whose durations were recorded."""
        return int(self.body_ns_SB.shape[0])

    @property
    def computes_B(self) -> NDArray[np.bool_]:
        """True for body nodes that are computation; the others are communications."""
        computes: NDArray[np.bool_] = self.kind_N[self.n_prologue :] == NodeKind.COMPUTE
        return computes

    @property
    def communicates_N(self) -> NDArray[np.bool_]:
        """True for nodes that are communications."""
        communicates: NDArray[np.bool_] = self.kind_N != NodeKind.COMPUTE
        return communicates

    @property
    def compute_ns_S(self) -> NDArray[np.int64]:
        """Total duration of computation in each sampled step."""
        total: NDArray[np.int64] = self.body_ns_SB[:, self.computes_B].sum(axis=1)
        return total

    def columns_of(self, nodes: slice | NDArray[np.int64]) -> dict[str, Any]:
        """Return the :data:`NODE_COLUMNS` of some stored nodes, by name."""
        return {name: getattr(self, name)[nodes] for name in NODE_COLUMNS}

    def template(self, position: int) -> int:
        """Return the stored node at a position of the stream ``prologue, body, body, …``."""
        if position < self.n_nodes:
            return position
        return self.n_prologue + (position - self.n_prologue) % self.n_body

    def templates(self, position: int, count: int) -> NDArray[np.int64]:
        """Return :meth:`template` of ``count`` positions, beginning with ``position``."""
        nodes_N = np.arange(position, position + count, dtype=np.int64)
        later = nodes_N >= self.n_nodes
        nodes_N[later] = self.n_prologue + (nodes_N[later] - self.n_prologue) % self.n_body
        return nodes_N

    def predecessors(self, node: int) -> NDArray[np.int32]:
        """Return the distances back from ``node`` to each of its predecessors."""
        return self.pred_distance_P[self.pred_start_N1[node] : self.pred_start_N1[node + 1]]

    def communications(self, start: int, stop: int) -> Iterator[int]:
        """Iterate over the communication nodes in ``[start, stop)``, in program order."""
        found = np.flatnonzero(self.kind_N[start:stop] != NodeKind.COMPUTE) + start
        return iter(found.tolist())

    def participants(self, node: int) -> tuple[int, ...]:
        """Return the global ranks of a communication: the whole group, or a message's two ends."""
        ranks = self.groups[int(self.group_index_N[node])].ranks
        if not CollectiveOp(int(self.op_N[node])).is_p2p:
            return ranks
        at = ranks.index(self.rank) + int(self.peer_N[node])
        return self.rank, ranks[at % len(ranks)]

    @property
    def co_measured_with(self) -> frozenset[int]:
        """Ranks of this target node that really communicated during capture, this one included."""
        return frozenset(self.facts.co_run.ranks) if self.facts.co_run else frozenset()

    def site(self, node: int) -> str:
        """Return the call site of ``node`` as ``file:line``, or ``"unknown call site"``."""
        index = int(self.site_N[node])
        return self.sites[index] if index >= 0 else "unknown call site"

    def group_label(self, group_index: int) -> str:
        """Return a group's name in results: the program's own, or else ``group`` and its index."""
        return self.groups[group_index].name or f"group {group_index}"

    def describe(self, node: int) -> str:
        """Describe a node in one phrase for messages: operation, bytes, group, call site."""
        if self.kind_N[node] == NodeKind.COMPUTE:
            return f"computation '{self.labels[self.label_N[node]]}'"
        op = CollectiveOp(int(self.op_N[node])).spelling
        group = self.groups[int(self.group_index_N[node])]
        if group.within is not None:
            group = self.groups[group.within]
        name = f"group '{group.name}'" if group.name else "group"
        n_bytes = int(self.bytes_N[node])
        return f"{op} of {n_bytes:,} bytes in {name} of {len(group.ranks)}, {self.site(node)}"

    def fingerprint(self) -> str:
        """Hash the program, without durations, sites and rank: equal ⇒ ranks may share a class.

        Covers kinds, operations, lanes, edges, bytes, peers, and the *sizes* of groups by group
        index.
        """
        digest = hashlib.sha256()
        digest.update(repr([len(g.ranks) for g in self.groups]).encode())
        digest.update(repr((self.n_prologue, self.lanes)).encode())
        for name in (*PROGRAM_COLUMNS, "pred_start_N1", "pred_distance_P"):
            column = getattr(self, name)
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()
