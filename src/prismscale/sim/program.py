"""Compiles a class's trace for the engine: plain lists, channels instead of groups, lifetimes.

See :mod:`prismscale.graph.channels` for channels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import GraphError
from prismscale.graph.channels import ChannelKey, ClassChannels, classes_of
from prismscale.graph.job_graph import GroupSlot, JobGraph, RankClass
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import RankTrace

SEND = int(NodeKind.SEND)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPlan:
    """How members of a class exchange times with the groups of one family."""

    order_M: NDArray[np.int64] | None
    """Permutation that brings members into (position, group) order; None if it is the identity."""
    positions: int
    """Number of group positions that this class fills: its members per group."""
    n_groups: int
    group_M: NDArray[np.int64] | None
    """Group of each member, to read results back; None if a plain broadcast is enough."""

    def to_groups(self, time_M: NDArray[np.int64]) -> NDArray[np.int64]:
        """Take the latest time in each group: ``[..., M]`` (or ``[..., 1]``) → ``[..., G]``."""
        if time_M.shape[-1] == 1:
            return time_M
        ordered = time_M if self.order_M is None else np.take(time_M, self.order_M, axis=-1)
        if self.positions == 1:
            return ordered
        if self.n_groups == 1:
            return ordered.max(axis=-1, keepdims=True)
        # In (position, group) order, the members of a group are in one column.
        split = ordered.reshape(*ordered.shape[:-1], self.positions, self.n_groups)
        return split.max(axis=-2)

    def to_members(self, time_G: NDArray[np.int64]) -> NDArray[np.int64]:
        """Turn times per group into times per member; ``[..., 1]`` stays as is and broadcasts."""
        if self.group_M is None or time_G.shape[-1] == 1:
            return time_G
        return np.take(time_G, self.group_M, axis=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Edges:
    """The lists of a :class:`ClassProgram` that depend on its trace alone."""

    kinds: list[int]
    preds: list[tuple[int, ...]]
    frees: list[tuple[int, ...]]
    kept: list[bool]
    ends_step: list[bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassProgram:
    """One class, ready to run. Lists are indexed by template node: prologue, then one body."""

    index: int
    n_members: int
    n_prologue: int
    n_body: int
    kinds: list[int]
    preds: list[tuple[int, ...]]
    """Distances back to the predecessors."""
    frees: list[tuple[int, ...]]
    """Distances back to nodes whose end time no node needs after this one."""
    kept: list[bool]
    """False if no later node needs this node's end time."""
    channels: list[int]
    plans: list[SlotPlan | None]
    speaks: list[bool]
    """True if the duration of the communication is read from this class."""
    ends_step: list[bool]
    """True if no later node of the same step waits for this one. A step has ended when all of these
    nodes have ended: on the host, on every stream, and in the network."""

    def template(self, position: int) -> int:
        """Return the template node of a stream position."""
        if position < self.n_prologue:
            return position
        return self.n_prologue + (position - self.n_prologue) % self.n_body


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """A channel of the job, and the classes that take part in its communications."""

    key: ChannelKey
    classes: tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class JobProgram:
    """All classes of a job, compiled."""

    graph: JobGraph
    classes: list[ClassProgram] = field(default_factory=list)
    channels: list[Channel] = field(default_factory=list)


def compile_job(graph: JobGraph) -> JobProgram:
    """Compile every class of ``graph``.

    Raises:
        GraphError: the body of a class is empty, or a class has a point-to-point node and its
            members have different positions in the group.
    """
    program = JobProgram(graph=graph)
    channel_ids: dict[ChannelKey, int] = {}
    edges: dict[int, Edges] = {}
    for rank_class in graph.classes:
        trace = rank_class.trace
        # Several execution classes may share one stored trace.
        known = edges.get(id(trace)) or edges.setdefault(id(trace), _edges(trace))
        program.classes.append(
            _compile_class(graph, rank_class, known, channel_ids, program.channels)
        )
    return program


def _edges(trace: RankTrace) -> Edges:
    starts, distances = trace.pred_start_N1.tolist(), trace.pred_distance_P.tolist()
    preds = [tuple(distances[a:b]) for a, b in pairwise(starts)]
    frees, kept = _lifetimes(trace, preds)
    return Edges(
        kinds=trace.kind_N.tolist(),
        preds=preds,
        frees=frees,
        kept=kept,
        ends_step=_last_of_step(trace, preds),
    )


def _last_of_step(trace: RankTrace, preds: list[tuple[int, ...]]) -> list[bool]:
    """Return True for body nodes that no later node of the same step waits for."""
    last = [node >= trace.n_prologue for node in range(trace.n_nodes)]
    for reader in range(trace.n_prologue, trace.n_nodes):
        for distance in preds[reader]:
            # Otherwise the source lies in an earlier step, and may still be the last node of that
            # step.
            if reader - distance >= trace.n_prologue:
                last[reader - distance] = False
    return last


def _compile_class(
    graph: JobGraph,
    rank_class: RankClass,
    edges: Edges,
    channel_ids: dict[ChannelKey, int],
    channels: list[Channel],
) -> ClassProgram:
    trace = rank_class.trace
    n = trace.n_nodes
    if trace.n_body == 0:
        raise GraphError(f"class {rank_class.index}: a step without work has no end")
    group_indices, used = trace.group_index_N.tolist(), ClassChannels(graph, rank_class)
    plans_by_group = [_slot_plan(graph, rank_class, slot) for slot in rank_class.slots]
    node_channels = [-1] * n
    plans: list[SlotPlan | None] = [None] * n
    speaks = [False] * n
    for i in trace.communications(0, n):
        key = used.of(i)
        if key not in channel_ids:
            channel_ids[key] = len(channels)
            channels.append(Channel(key=key, classes=classes_of(graph, key)))
        node_channels[i] = channel_ids[key]
        plans[i] = plans_by_group[group_indices[i]]
        speaks[i] = (
            edges.kinds[i] == SEND
            if key.is_p2p
            else channels[channel_ids[key]].classes[0] == rank_class.index
        )
    return ClassProgram(
        index=rank_class.index,
        n_members=rank_class.size,
        n_prologue=trace.n_prologue,
        n_body=trace.n_body,
        kinds=edges.kinds,
        preds=edges.preds,
        frees=edges.frees,
        kept=edges.kept,
        channels=node_channels,
        plans=plans,
        speaks=speaks,
        ends_step=edges.ends_step,
    )


def _slot_plan(graph: JobGraph, rank_class: RankClass, slot: GroupSlot) -> SlotPlan:
    n_groups = graph.families[slot.family].n_groups
    order = np.argsort(slot.slot_M, kind="stable")
    identity = np.arange(rank_class.size)
    same_order = bool(np.array_equal(order, identity))
    # With one group, or one member per group in the order of the groups, a broadcast is enough.
    trivial = n_groups == 1 or (rank_class.size == n_groups and same_order)
    return SlotPlan(
        order_M=None if same_order else order,
        positions=rank_class.size // n_groups,
        n_groups=n_groups,
        group_M=None if trivial else slot.group_M,
    )


def _lifetimes(
    trace: RankTrace, preds: list[tuple[int, ...]]
) -> tuple[list[tuple[int, ...]], list[bool]]:
    """Return, by template node, which end times it frees, and whether its own is needed.

    A body node is last read ``d`` positions later, the same in every step, so its last reader and
    the distance can be stored once. A prologue node that the body still reads is kept for ever: it
    is read only in the first steps, and a table for steady steps cannot say so.
    """
    n, prologue, body = trace.n_nodes, trace.n_prologue, trace.n_body
    last_distance = [0] * n
    read_by_body = [False] * n
    for reader in range(n):
        for distance in preds[reader]:
            source = reader - distance
            if reader < prologue:
                if source >= 0:
                    last_distance[source] = max(last_distance[source], distance)
                continue
            # In later steps the same edge starts one body further on each time. Its source lies in
            # the prologue for the first of these steps.
            for early in range(source if source >= 0 else source % body, prologue, body):
                read_by_body[early] = True
            steady = prologue + (reader - prologue - distance) % body
            last_distance[steady] = max(last_distance[steady], distance)
    frees: list[list[int]] = [[] for _ in range(n)]
    for source, distance in enumerate(last_distance):
        if distance and not read_by_body[source]:
            # Its last reader frees it. For a body node that is the reader's place in a steady step.
            reader = source + distance
            if source >= prologue:
                reader = prologue + (reader - prologue) % body
            frees[reader].append(distance)
    kept = [d > 0 or r for d, r in zip(last_distance, read_by_body, strict=True)]
    return [tuple(f) for f in frees], kept
