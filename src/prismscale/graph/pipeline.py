"""Finds the pipeline stages of ranks from the groups in which they send and receive.

Most programs do not say which group is the pipeline. A rank that sends or receives messages in a
group is assumed to be at the stage that is its group rank there. DeepSpeed sends them in the group
of all ranks; then the pipeline is the smallest group that holds both ends. If groups are named, the
names count: context-parallel attention passes keys and values around in a group, and its ranks are
not stages.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.trace import RankTrace

_PIPELINE = re.compile(r"pipeline|(^|_)pp($|_)", re.IGNORECASE)
_CONTEXT = re.compile(r"context|(^|_)cp($|_)", re.IGNORECASE)
"""Patterns for group names, as Megatron-LM and device meshes give them."""


def is_named_for_pipeline(group_name: str) -> bool:
    """Return whether a group's name says that it is a pipeline."""
    return _PIPELINE.search(group_name) is not None


def message_groups(trace: RankTrace) -> list[int]:
    """Return the indices of the groups in which a rank sends or receives, ascending."""
    return sorted(set(trace.group_index_N[trace.is_message_N].tolist()))


def stage_of(rank_class: RankClass) -> int | None:
    """Return the stage of a class for display, or None if it passes no messages.

    The stage is the group rank in the pipeline of the *first* message. If a job passes messages in
    one group only, as most jobs do, :func:`pipeline_places` gives the same stage.
    """
    groups = pipeline_groups(rank_class.trace)
    return rank_class.slots[groups[0]].group_rank if groups else None


def pipeline_places(graph: JobGraph) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the stage and the replica of every rank.

    Unlike :func:`stage_of`, this gives a place to all members of a group in which any rank passes
    messages, also to members that pass none. If a rank is in several such groups, the *last* one
    counts, by class and by creation. Without messages every rank is stage 0 of a replica of its
    own.

    Returns:
        ``stage_R`` and ``replica_R``: ranks of one replica are members of one such group.
    """
    stage_R = np.zeros(graph.world_size, dtype=np.int64)
    replica_R = np.arange(graph.world_size, dtype=np.int64)
    for rank_class in graph.classes:
        for group_index in sorted(set(pipeline_groups(rank_class.trace))):
            ranks_KG = graph.families[rank_class.slots[group_index].family].ranks_KG
            stage_R[ranks_KG] = np.arange(len(ranks_KG))[:, None]
            # The smallest member names the replica, independently of the family.
            replica_R[ranks_KG] = ranks_KG.min(axis=0)
    return stage_R, replica_R


def pipeline_groups(trace: RankTrace) -> list[int]:
    """Return the indices of the pipeline groups of a rank, in order of its first message in each.

    If a group is named for a pipeline, only such groups count. Otherwise all groups count that are
    not named for context parallelism.
    """
    found = dict.fromkeys(smallest_group(trace, *message) for message in messages_of(trace))
    names = {group_index: trace.groups[group_index].name for group_index in found}
    named = [g for g, name in names.items() if is_named_for_pipeline(name)]
    return named or [g for g, name in names.items() if not _CONTEXT.search(name)]


def messages_of(trace: RankTrace) -> list[tuple[int, int]]:
    """Return the distinct (group index, peer) of a rank's messages, in order of first use."""
    columns = (trace.group_index_N, trace.peer_N)
    rows = (column[trace.is_message_N].tolist() for column in columns)
    return list(dict.fromkeys(zip(*rows, strict=True)))


def smallest_group(trace: RankTrace, group_index: int, peer: int) -> int:
    """Return the index of the smallest of a rank's groups that holds both ends of a message.

    Of several equally small groups, it is the one in which the message is sent, or else the oldest:
    the other end finds the same group.
    """
    ranks = trace.groups[group_index].ranks
    other = ranks[(ranks.index(trace.rank) + peer) % len(ranks)]
    # A message to the rank itself is a mistake. It keeps its group, so that the error describes the
    # program's own call.
    fits = (k for k, g in enumerate(trace.groups) if other in g.ranks and other != trace.rank)
    return min(
        fits, key=lambda k: (len(trace.groups[k].ranks), k != group_index, k), default=group_index
    )
