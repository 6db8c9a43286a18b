"""Channels: the places where ranks meet to communicate.

A group family has one channel for its collectives. It has one more for each (source, destination)
pair of group ranks that exchange point-to-point messages, and for each tag of theirs. The n-th use
of a channel by one side meets the n-th use by every other side: exactly the ordering rule of a
process group.
"""

from __future__ import annotations

from typing import NamedTuple

from prismscale.errors import GraphError
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.node import NodeKind


class ChannelKey(NamedTuple):
    """Identity of a channel within a job."""

    family: int
    source: int
    """Group rank of the sender; -1 for collectives."""
    destination: int
    """Group rank of the receiver; -1 for collectives."""
    tag: int = 0
    """Tag of the messages. Messages with other tags may overtake them."""

    @property
    def is_p2p(self) -> bool:
        """True for a (source, destination) channel."""
        return self.source >= 0


class ClassChannels:
    """The channels of a class's communications, cached: a step uses few of them thousands of times.

    Args:
        graph: the job.
        rank_class: one of its classes.
    """

    def __init__(self, graph: JobGraph, rank_class: RankClass) -> None:
        trace = rank_class.trace
        self._graph, self._class = graph, rank_class
        columns = (trace.kind_N, trace.group_index_N, trace.peer_N)
        self._use_N = list(zip(*(c.tolist() for c in columns), strict=True))
        self._known: dict[tuple[int, int, int], ChannelKey] = {}

    def of(self, node: int) -> ChannelKey:
        """Return the channel of communication ``node``.

        Raises:
            GraphError: the node is point-to-point, and the members of the class have different
                positions in the group (they would have different peers); or a message is sent to
                its own rank.
        """
        use = self._use_N[node]
        found = self._known.get(use)
        if found is None:
            found = self._known[use] = _channel_of(self._graph, self._class, node)
        return found


def classes_of(graph: JobGraph, key: ChannelKey) -> tuple[int, ...]:
    """Return the classes that must use a channel, in order of their first position in the group."""
    table = graph.families[key.family].ranks_KG
    ranks = table[:, 0] if not key.is_p2p else table[[key.source, key.destination], 0]
    return tuple(dict.fromkeys(graph.class_of_R[ranks].tolist()))


def _channel_of(graph: JobGraph, rank_class: RankClass, node: int) -> ChannelKey:
    trace = rank_class.trace
    slot = rank_class.slots[int(trace.group_index_N[node])]
    if trace.kind_N[node] == NodeKind.COLLECTIVE:
        return ChannelKey(slot.family, -1, -1)
    if slot.group_rank < 0:
        raise GraphError(
            f"class {rank_class.index}: {trace.describe(node)} is point-to-point, but the members "
            "sit at different positions of that group; the class must be split by position"
        )
    size = graph.families[slot.family].group_size
    tag, offset = divmod(int(trace.peer_N[node]), size)
    peer = (slot.group_rank + offset) % size
    if peer == slot.group_rank:
        raise GraphError(f"class {rank_class.index}: {trace.describe(node)} is sent to itself")
    if trace.kind_N[node] == NodeKind.SEND:
        return ChannelKey(slot.family, slot.group_rank, peer, tag)
    return ChannelKey(slot.family, peer, slot.group_rank, tag)
