"""Where ranks sit in a pipeline, read off the groups in which they send and receive.

Mostly nobody says which group is the pipeline's: a rank that passes messages in a group is at the
stage that is its group rank there. DeepSpeed passes them in the group of all ranks: then it is the
smallest group in which both ends are. Where groups are named, names count: attention that is spread
over a sequence passes keys and values around, and its ranks are no stages.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.trace import RankTrace

_PIPELINE = re.compile(r"pipeline|(^|_)pp($|_)", re.IGNORECASE)
_CONTEXT = re.compile(r"context|(^|_)cp($|_)", re.IGNORECASE)
"""In names of groups: Megatron-LM's, and meshes'."""


def is_named_for_pipeline(group_name: str) -> bool:
    """Whether a program calls a group its pipeline."""
    return _PIPELINE.search(group_name) is not None


def message_groups(trace: RankTrace) -> list[int]:
    """Group indices of the groups in which a rank sends or receives, ascending."""
    return sorted(set(trace.group_index_N[trace.is_message_N].tolist()))


def stage_of(rank_class: RankClass) -> int | None:
    """Stage of a class, for people: its group rank in the group of its *first* message, None where
    it passes none. Where a job passes messages in one group only, as most do, that is also what
    :func:`pipeline_places` says."""
    groups = pipeline_groups(rank_class.trace)
    return rank_class.slots[groups[0]].group_rank if groups else None


def pipeline_places(graph: JobGraph) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Stage and replica of every rank.

    This asks more than :func:`stage_of`: all members of a group in which anybody passes messages
    have a place in it, also those who pass none. Of several groups the *last* one counts, by class
    and by creation. Without messages every rank is stage 0 of a replica of its own.

    Returns:
        ``stage_R`` and ``replica_R``: ranks of one replica are members of one such group.
    """
    stage_R = np.zeros(graph.world_size, dtype=np.int64)
    replica_R = np.arange(graph.world_size, dtype=np.int64)
    for rank_class in graph.classes:
        for group_index in sorted(set(pipeline_groups(rank_class.trace))):
            ranks_KG = graph.families[rank_class.slots[group_index].family].ranks_KG
            stage_R[ranks_KG] = np.arange(len(ranks_KG))[:, None]
            # Smallest member: a name for the replica that does not depend on the family.
            replica_R[ranks_KG] = ranks_KG.min(axis=0)
    return stage_R, replica_R


def pipeline_groups(trace: RankTrace) -> list[int]:
    """Group indices of the pipelines in which a rank passes messages, in the order of its first
    messages there."""
    found = dict.fromkeys(smallest_group(trace, *message) for message in messages_of(trace))
    names = {group_index: trace.groups[group_index].name for group_index in found}
    named = [g for g, name in names.items() if is_named_for_pipeline(name)]
    return named or [g for g, name in names.items() if not _CONTEXT.search(name)]


def messages_of(trace: RankTrace) -> list[tuple[int, int]]:
    """Group index and peer of a rank's messages, each once, in the order of the first."""
    columns = (trace.group_index_N, trace.peer_N)
    rows = (column[trace.is_message_N].tolist() for column in columns)
    return list(dict.fromkeys(zip(*rows, strict=True)))


def smallest_group(trace: RankTrace, group_index: int, peer: int) -> int:
    """Index of the smallest of a rank's groups that holds both ends of a message. Of several as
    small, the one in which the message goes, or else the oldest: the other end finds the same."""
    ranks = trace.groups[group_index].ranks
    other = ranks[(ranks.index(trace.rank) + peer) % len(ranks)]
    # A message to itself is a mistake that is told as the program made it.
    fits = (k for k, g in enumerate(trace.groups) if other in g.ranks and other != trace.rank)
    return min(
        fits, key=lambda k: (len(trace.groups[k].ranks), k != group_index, k), default=group_index
    )
