"""Checks that an execution graph is legal, and names the ranks that break a rule.

A graph is legal when

1. every rank belongs to exactly one class;
2. every predecessor lies at least one position back in the same trace (so a trace has no cycle);
3. durations are not negative, computation has no group index, communication has one;
4. in every group, all members issue the same sequence of collectives: same operation, same root,
   and, where the operation demands it, the same bytes;
5. on every (source, destination) pair, the sends and receives agree in number and bytes;
6. rules 4 and 5 hold for the prologue and for the body separately, because the body repeats.

A cycle *through* communications (two groups used in opposite order by their members) is legal by
these rules and found by the engine, which raises :class:`prismscale.errors.StuckError`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prismscale.errors import GraphError, MismatchError
from prismscale.graph.channels import ChannelKey, ClassChannels, classes_of
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import RankTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """One use of a channel by one class."""

    rank_class: RankClass
    node: int

    def signature(self) -> tuple[int, int, int]:
        """Return what all sides must agree on: operation, root, bytes (0 if they may differ)."""
        trace = self.rank_class.trace
        op = CollectiveOp(int(trace.op_N[self.node]))
        n_bytes = int(trace.bytes_N[self.node])
        if op.is_p2p:
            return (-1, -1, n_bytes)
        return (op, int(trace.peer_N[self.node]), n_bytes if op.bytes_must_agree else 0)

    def sentence(self) -> str:
        """Return the rank and its call as a clause for error messages."""
        rank = int(self.rank_class.members_M[0])
        return f"rank {rank} calls {self.rank_class.trace.describe(self.node)}"


def verify(graph: JobGraph) -> None:
    """Check every rule of a legal graph.

    Raises:
        GraphError: the graph breaks one of rules 1-3.
        MismatchError: the graph breaks one of rules 4-6; names rank, group and call site.
    """
    if (graph.class_of_R < 0).any() or sum(c.size for c in graph.classes) != graph.world_size:
        raise GraphError("classes do not partition the ranks of the job")
    for rank_class in graph.classes:
        _verify_trace(rank_class.trace)
    channels = [ClassChannels(graph, rank_class) for rank_class in graph.classes]
    for part in ("prologue", "body"):
        uses: dict[ChannelKey, dict[int, list[Use]]] = {}
        for rank_class, used in zip(graph.classes, channels, strict=True):
            for use in _uses(rank_class, part):
                by_class = uses.setdefault(used.of(use.node), {})
                by_class.setdefault(rank_class.index, []).append(use)
        for key, by_class in uses.items():
            _verify_channel(graph, key, by_class, part)


def _uses(rank_class: RankClass, part: str) -> Iterator[Use]:
    trace = rank_class.trace
    span = (0, trace.n_prologue) if part == "prologue" else (trace.n_prologue, trace.n_nodes)
    return (Use(rank_class=rank_class, node=i) for i in trace.communications(*span))


def _verify_trace(trace: RankTrace) -> None:
    who = f"trace of rank {trace.rank}"
    if (trace.pred_distance_P < 1).any():
        raise GraphError(f"{who}: a predecessor does not lie before its node")
    if (np.diff(trace.pred_start_N1) < 0).any():
        raise GraphError(f"{who}: predecessor rows run backwards")
    if (trace.prologue_ns < 0).any() or (trace.body_ns_SB < 0).any():
        raise GraphError(f"{who}: negative duration")
    is_compute = trace.kind_N == NodeKind.COMPUTE
    if (trace.group_index_N[is_compute] >= 0).any():
        raise GraphError(f"{who}: a computation names a group")
    group_indices = trace.group_index_N[~is_compute]
    if ((group_indices < 0) | (group_indices >= len(trace.groups))).any():
        raise GraphError(f"{who}: a communication names none of the rank's groups")


def _verify_channel(
    graph: JobGraph, key: ChannelKey, by_class: dict[int, list[Use]], part: str
) -> None:
    expected = classes_of(graph, key)
    first = next(iter(by_class.values()))
    for index in expected:
        if index not in by_class:
            rank = int(graph.classes[index].members_M[0])
            raise MismatchError(
                f"{first[0].sentence()} in the {_part(part)}, but rank {rank}, which belongs to "
                f"the same group, never does{_hint(part)}"
            )
    sequences = [by_class[index] for index in expected]
    for ours, theirs in itertools.pairwise(sequences):
        # Calls of both sides come first: a difference there says more than a number of calls.
        for n, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a.signature() != b.signature():
                raise MismatchError(
                    f"communication {n} of a group in the {_part(part)} differs between members: "
                    f"{a.sentence()}, but {b.sentence()}{_hint(part)}"
                )
        if len(ours) != len(theirs):
            longer, shorter = sorted((ours, theirs), key=len, reverse=True)
            rank = int(shorter[0].rank_class.members_M[0])
            raise MismatchError(
                f"{longer[len(shorter)].sentence()} in the {_part(part)}, but rank {rank}, which "
                f"belongs to the same group, makes only {len(shorter)} such calls{_hint(part)}"
            )


def _hint(part: str) -> str:
    """Return a possible cause besides a mistake in the program, for the end of a message."""
    if part == "body":
        return ""
    return (
        ". (Ranks run at different times here: those that find files which others have just saved, "
        "a checkpoint for one, go another way)"
    )


def _part(part: str) -> str:
    return "steps" if part == "body" else "part before the steps"
