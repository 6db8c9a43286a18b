"""Computes the extra time of communications that share links because they run at the same time.

A collective model sees one communication at a time. Here the job is simulated, and wherever
communications on different lanes of a rank are in progress together, NVLink and the network cards
are divided among them (:mod:`prismscale.sim.fair_sharing`). The longer times may change which
communications overlap. So the job is simulated again with them, until the times settle.

Sends and receives of a rank do not slow each other down. The other ranks of its node are assumed to
do what it does, as in an SPMD program: the model already shares the cards among groups of one
family. A communication that was measured keeps its time, which already includes the effect of
sharing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prismscale.cluster import Cluster
from prismscale.cost.collective import AnalyticCollectiveModel
from prismscale.durations.graph_durations import GraphDurations
from prismscale.graph.channels import ChannelKey, ClassChannels
from prismscale.graph.job_graph import RankClass
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.sim.fair_sharing import Flow, shared_ns
from prismscale.sim.retime import retime
from prismscale.sim.settled import Extra, settled
from prismscale.sim.timeline import RankTimeline


def sharing_links(durations: GraphDurations, cluster: Cluster) -> GraphDurations:
    """Return ``durations`` for a job whose groups share the links of ``cluster``.

    Args:
        durations: durations with each communication as if alone.
        cluster: the cluster as what-ifs on its links leave it.
    """
    sharing = _Sharing(alone=durations, model=AnalyticCollectiveModel(cluster))
    if not sharing.can_meet:
        return durations

    def with_extra(extra: Extra) -> GraphDurations:
        return replace(durations, shared_ns=extra)

    def extra_in(found: GraphDurations) -> tuple[Extra, int]:
        retimed = retime(found, ranks=sharing.observed)
        return sharing.extra(retimed.timeline.ranks), retimed.step_ns

    return settled(durations, with_extra, extra_in)


@dataclass(frozen=True, kw_only=True)
class _Sharing:
    alone: GraphDurations
    model: AnalyticCollectiveModel

    @property
    def can_meet(self) -> bool:
        """True if any class has communications on several lanes that use the same link."""
        return any(
            len({lane for lane, use in own.values() if link in use}) > 1
            for own in self._uses.values()
            for link in {link for _, use in own.values() for link in use}
        )

    @property
    def observed(self) -> list[int]:
        """One rank of each class."""
        return [int(c.members_M[0]) for c in self.alone.graph.classes]

    def extra(self, ranks: Mapping[int, RankTimeline]) -> Extra:
        """Return the extra time of communications in a settled step."""
        graph = self.alone.graph
        by_meeting: dict[tuple[object, ...], int] = defaultdict(int)
        for rank_class in graph.classes:
            for node, extra_ns in self._stretched(
                rank_class, ranks[int(rank_class.members_M[0])]
            ).items():
                meeting = self._meetings[rank_class.index][node]
                by_meeting[meeting] = max(by_meeting[meeting], extra_ns)
        out = {}
        for rank_class in graph.classes:
            extra_B = np.zeros(rank_class.trace.n_body, dtype=np.int64)
            for node, meeting in self._meetings[rank_class.index].items():
                extra_B[node] = by_meeting.get(meeting, 0)
            out[rank_class.index] = extra_B
        return out

    def _stretched(self, rank_class: RankClass, seen: RankTimeline) -> dict[int, int]:
        """Return the extra time of communications in a step of a rank, by body node."""
        uses, n_body = self._uses[rank_class.index], rank_class.trace.n_body
        flows, nodes = [], []
        for row, node in seen.around_inner_step(n_body):
            if node not in uses:
                continue
            lane, use = uses[node]
            flows.append(
                Flow(
                    lane=lane,
                    start_ns=int(seen.moves_from_ns_N[row]),
                    alone_ns=self._alone_ns(rank_class, node),
                    use=use,
                )
            )
            nodes.append((row, node))
        return {
            node: round(ns) - t.alone_ns
            for (row, node), t, ns in zip(nodes, flows, shared_ns(flows), strict=True)
            if row in seen.inner_step(n_body)
        }

    def _alone_ns(self, rank_class: RankClass, node: int) -> int:
        known = self.alone.communication_ns(rank_class.index, rank_class.trace.n_prologue + node)
        return int(known.max())

    @cached_property
    def _uses(self) -> dict[int, dict[int, tuple[int, dict[str, float]]]]:
        """By class and body node: lane and link shares of the modelled communications."""
        return {c.index: self._uses_of(c) for c in self.alone.graph.classes}

    def _uses_of(self, rank_class: RankClass) -> dict[int, tuple[int, dict[str, float]]]:
        trace = rank_class.trace
        channels = ClassChannels(self.alone.graph, rank_class)
        cache: dict[tuple[ChannelKey, int, int, int], dict[str, float]] = {}
        out = {}
        for position in trace.communications(trace.n_prologue, trace.n_nodes):
            node = position - trace.n_prologue
            if not self.alone.is_modelled(rank_class.index, node):
                continue
            kind, op = int(trace.kind_N[position]), int(trace.op_N[position])
            what = (channels.of(position), kind, op, int(trace.bytes_N[position]))
            if what not in cache:
                cache[what] = self._links(*what)
            if cache[what]:
                out[node] = int(trace.lane_N[position]), cache[what]
        return out

    def _links(self, channel: ChannelKey, kind: int, op: int, n_bytes: int) -> dict[str, float]:
        """Return the share of each link, by direction, that a communication uses."""
        use = self.model.link_use(CollectiveOp(op), n_bytes, self.alone.places(channel))
        ways = {NodeKind.SEND: ("out",), NodeKind.RECV: ("in",)}.get(NodeKind(kind), ("out", "in"))
        links = (("nvlink", use.intra), ("network", use.inter))
        return {f"{link} {way}": share for link, share in links if share > 0.0 for way in ways}

    @cached_property
    def _meetings(self) -> dict[int, dict[int, tuple[object, ...]]]:
        """By class and body node: a key that all sides of the same communication have in common."""
        graph = self.alone.graph
        out: dict[int, dict[int, tuple[object, ...]]] = {}
        for rank_class in graph.classes:
            trace, channels = rank_class.trace, ClassChannels(graph, rank_class)
            uses: dict[ChannelKey, int] = defaultdict(int)
            out[rank_class.index] = own = {}
            for position in trace.communications(trace.n_prologue, trace.n_nodes):
                channel = channels.of(position)
                who = self._together(channel).get(rank_class.index, rank_class.index)
                own[position - trace.n_prologue] = (channel, who, uses[channel])
                uses[channel] += 1
        return out

    def _together(self, channel: ChannelKey) -> dict[int, int]:
        """Map each class on a channel to the lowest class that it is connected with by groups."""
        if channel not in self._known_together:
            graph = self.alone.graph
            table = graph.families[channel.family].ranks_KG
            if channel.is_p2p:
                table = table[[channel.source, channel.destination]]
            self._known_together[channel] = _joined(graph.class_of_R[table])
        return self._known_together[channel]

    @cached_property
    def _known_together(self) -> dict[ChannelKey, dict[int, int]]:
        return {}


def _joined(class_KG: NDArray[np.int64]) -> dict[int, int]:
    """Map each class of group members to the lowest class that groups connect it with."""
    lowest = {int(c): int(c) for c in np.unique(class_KG)}
    for classes in np.unique(np.sort(class_KG, axis=0), axis=1).T:
        members = {lowest[int(c)] for c in classes}
        if len(members) > 1:
            least = min(members)
            lowest = {c: least if low in members else low for c, low in lowest.items()}
    return lowest
