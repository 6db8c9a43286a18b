"""What one captured rank did: a :class:`RankTrace`.

A trace is a program, not a timeline. It has a *prologue* (everything before the program settles)
and a *body* (one steady step), which repeats for ever. Nodes are numbered by their position in the
unrolled stream ``prologue, body, body, …``; a predecessor is stored as the *distance* back in that
stream, so an edge that crosses a step boundary is an ordinary edge.

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
"""Of a node, in files: two years. Sums of such durations stay below the engine's "never"."""
HOST = "host"
"""Name of the host's lane."""
NO_FACTS = CaptureFacts()
NO_GROUP = -1
"""``group_index`` of a node that is not a communication."""
PROGRAM_COLUMNS = ("kind_N", "op_N", "lane_N", "group_index_N", "peer_N", "bytes_N")
"""Those of :data:`NODE_COLUMNS` that say what a node does, wherever the program asks for it."""
NODE_COLUMNS = (*PROGRAM_COLUMNS, "site_N", "label_N")
"""Fields of a trace with one value for each node, whatever its edges and durations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """One process group as a program created it. Two groups may hold the same ranks."""

    ranks: tuple[int, ...]
    """Global ranks in group order: position in this tuple is the group rank."""
    name: str = ""
    """What the program calls it (mesh axis or ``group_desc``); empty where it said nothing."""
    backend: str = ""
    """The backend the program asked for, for example ``nccl``."""
    within: int | None = None
    """Of a group that no program created: the group index of the larger one in which the messages
    are sent that are in it (:mod:`prismscale.graph.assembly.narrowed`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPart:
    """Device memory that one user of it holds."""

    name: str
    n_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRecord:
    """Device memory of one rank, in bytes."""

    peak_bytes: int
    """Highest allocated bytes from the start of the program to the last tracked step."""
    peak_step: int
    """Step in which the peak lies; -1 is before the first step."""
    step_peak_bytes: tuple[int, ...] = ()
    """Highest allocated bytes within each tracked step."""
    reserved_bytes: int | None = None
    """Highest bytes held by the caching allocator, where there is one."""
    outside: tuple[MemoryPart, ...] = ()
    """What others than the allocator hold in the end, where it is modelled; largest first."""
    source: str = "measured"
    """``measured`` (allocator of the device) or ``modelled``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceColumns:
    """Nodes of a program, their edges and durations: a trace without whose it is."""

    n_prologue: int
    kind_N: NDArray[np.uint8]
    op_N: NDArray[np.uint8]
    """:class:`CollectiveOp` of communications; 0 for COMPUTE."""
    lane_N: NDArray[np.int16]
    """Index into :attr:`lanes`: the host or a device stream. For display, and to tell which
    computation ends a step; edges rule."""
    group_index_N: NDArray[np.int16]
    peer_N: NDArray[np.int32]
    """SEND/RECV: the peer's group rank minus ours, modulo group size, plus group size times the
    message's tag. Rooted collectives: the root's group rank. Otherwise -1."""
    bytes_N: NDArray[np.int64]
    site_N: NDArray[np.int32]
    """Index into :attr:`sites`: the call site in the user's program; -1 unknown."""
    label_N: NDArray[np.int32]
    """Index into :attr:`labels`: what the node is called on a timeline."""
    pred_start_N1: NDArray[np.int32]
    """Row pointers (length N + 1) into :attr:`pred_distance_P`."""
    pred_distance_P: NDArray[np.int32]
    """Distance back to each predecessor, at least 1."""
    prologue_ns: NDArray[np.int64]
    """Durations of prologue nodes. Communications have 0 unless they were measured."""
    body_ns_SB: NDArray[np.int64]
    """Durations of body nodes in each sampled step; a communication's is the time after its last
    arrival, or 0 where a model is to answer."""
    lanes: tuple[str, ...] = (HOST,)
    labels: tuple[str, ...] = ("",)
    sites: tuple[str, ...] = ()

    def by_name(self) -> dict[str, Any]:
        """Every column, by the name of its field: a :class:`RankTrace` is made with them."""
        return {field.name: getattr(self, field.name) for field in fields(TraceColumns)}

    @property
    def n_nodes(self) -> int:
        """Stored nodes: the prologue and one body."""
        return len(self.kind_N)

    @property
    def is_message_N(self) -> NDArray[np.bool_]:
        """Which nodes are sends or receives."""
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
    whole world. In a graph, groups for messages alone come after them."""
    known_groups: tuple[GroupRecord, ...]
    """Every group whose creation this rank saw, its own and others', in creation order."""
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
        """The captured rank whose steps these are: this one, unless it was found equal."""
        did = self.facts.equivalent_to
        return self.rank if did is None else did

    @property
    def n_body(self) -> int:
        """Nodes of one steady step."""
        return self.n_nodes - self.n_prologue

    @property
    def n_samples(self) -> int:
        """Steps whose durations were recorded."""
        return int(self.body_ns_SB.shape[0])

    @property
    def computes_B(self) -> NDArray[np.bool_]:
        """Which nodes of the body are computation; the others communicate."""
        computes: NDArray[np.bool_] = self.kind_N[self.n_prologue :] == NodeKind.COMPUTE
        return computes

    @property
    def communicates_N(self) -> NDArray[np.bool_]:
        """Which nodes are communications."""
        communicates: NDArray[np.bool_] = self.kind_N != NodeKind.COMPUTE
        return communicates

    @property
    def compute_ns_S(self) -> NDArray[np.int64]:
        """Computation of each sampled step."""
        total: NDArray[np.int64] = self.body_ns_SB[:, self.computes_B].sum(axis=1)
        return total

    def columns_of(self, nodes: slice | NDArray[np.int64]) -> dict[str, Any]:
        """The :data:`NODE_COLUMNS` of some stored nodes, by name."""
        return {name: getattr(self, name)[nodes] for name in NODE_COLUMNS}

    def template(self, position: int) -> int:
        """Stored node of a position in the unrolled stream ``prologue, body, body, …``."""
        if position < self.n_nodes:
            return position
        return self.n_prologue + (position - self.n_prologue) % self.n_body

    def templates(self, position: int, count: int) -> NDArray[np.int64]:
        """:meth:`template` of ``count`` positions from ``position`` on."""
        nodes_N = np.arange(position, position + count, dtype=np.int64)
        later = nodes_N >= self.n_nodes
        nodes_N[later] = self.n_prologue + (nodes_N[later] - self.n_prologue) % self.n_body
        return nodes_N

    def predecessors(self, node: int) -> NDArray[np.int32]:
        """Distances back from ``node`` to each of its predecessors."""
        return self.pred_distance_P[self.pred_start_N1[node] : self.pred_start_N1[node + 1]]

    def communications(self, start: int, stop: int) -> Iterator[int]:
        """Positions of communication nodes in ``[start, stop)``, in program order."""
        found = np.flatnonzero(self.kind_N[start:stop] != NodeKind.COMPUTE) + start
        return iter(found.tolist())

    def participants(self, node: int) -> tuple[int, ...]:
        """Global ranks that take part in a communication: the group's, or both of a message's."""
        ranks = self.groups[int(self.group_index_N[node])].ranks
        if not CollectiveOp(int(self.op_N[node])).is_p2p:
            return ranks
        at = ranks.index(self.rank) + int(self.peer_N[node])
        return self.rank, ranks[at % len(ranks)]

    @property
    def co_measured_with(self) -> frozenset[int]:
        """Ranks that are close together on the target, and really communicated here."""
        return frozenset(self.facts.co_run.ranks) if self.facts.co_run else frozenset()

    def site(self, node: int) -> str:
        """Call site of ``node`` as ``file:line``, or ``"unknown call site"``."""
        index = int(self.site_N[node])
        return self.sites[index] if index >= 0 else "unknown call site"

    def group_label(self, group_index: int) -> str:
        """What a group is called in results: as the program calls it, else by its number."""
        return self.groups[group_index].name or f"group {group_index}"

    def describe(self, node: int) -> str:
        """One phrase for error messages: operation, bytes, group, call site."""
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
        """Hash of everything but durations, sites and the rank: equal ⇒ ranks may share a class.

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
