"""Computes the extra time of computation that runs beside communications.

A communication's thread blocks hold multiprocessors from its rank's arrival until its end, so
kernels beside it are slower (:mod:`prismscale.cost.nccl.occupancy`). The job is simulated, and each
computation of a stream takes longer by what it loses while communications are in progress on its
rank. The longer times may change what runs beside what. So the job is simulated again with them,
until the times settle.

What lasts as long as its launches has no loss, and neither have the communications. DeepEP's and
Transformer Engine's own exchanges are kernels of their streams, which do not hold multiprocessors
here. Nor do collectives on the copy engines: that a program asks for them is not known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from prismscale.cluster import Cluster
from prismscale.cost.kernel_kinds import PRODUCT_KINDS
from prismscale.cost.nccl.occupancy import blocks, slowdown
from prismscale.cost.target_gpu import gpu_key, profile_of
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.node_kernels import NodeKernels
from prismscale.graph.channels import ClassChannels
from prismscale.graph.job_graph import RankClass
from prismscale.graph.node import NodeKind
from prismscale.sim.retime import retime
from prismscale.sim.settled import Extra, settled
from prismscale.sim.timeline import RankTimeline


def sharing_compute(
    durations: GraphDurations, cluster: Cluster, kernels: NodeKernels
) -> GraphDurations:
    """Return ``durations`` for a job whose communications take multiprocessors from its kernels.

    Args:
        durations: durations with each computation as if no communication ran beside it.
        cluster: the cluster, whose GPU computes.
        kernels: kernels of the job's nodes, at the costs of ``durations``.
    """
    sharing = _Beside(alone=durations, cluster=cluster, kernels=kernels)

    def with_extra(extra: Extra) -> GraphDurations:
        return replace(durations, beside_ns=extra)

    return settled(durations, with_extra, sharing.extra)


class HeldBlocks:
    """How many multiprocessors the communications of a rank hold, over time."""

    def __init__(self, intervals: Sequence[tuple[int, int, int]]) -> None:
        """Take ``(start, end, blocks)`` of each communication, in ns."""
        changes: dict[int, int] = {}
        for start, end, n in intervals:
            changes[start] = changes.get(start, 0) + n
            changes[end] = changes.get(end, 0) - n
        self._times = sorted(changes)
        self._held = list(accumulate(changes[t] for t in self._times))

    def stretched_ns(self, start_ns: int, alone_ns: int, pace: Mapping[int, float]) -> float:
        """Return how long computation takes that begins at ``start_ns`` and takes ``alone_ns``.

        ``pace`` says how many times as long computation takes, by multiprocessors held.
        """
        now, left = float(start_ns), float(alone_ns)
        at = bisect_right(self._times, start_ns) - 1
        while at + 1 < len(self._times):
            factor = pace[self._held[at]] if at >= 0 else 1.0
            room = (self._times[at + 1] - now) / factor
            if room >= left:
                return now + left * factor - start_ns
            now, left, at = float(self._times[at + 1]), left - room, at + 1
        return now + left - start_ns

    @property
    def numbers(self) -> set[int]:
        """All numbers of multiprocessors that are held at some time."""
        return set(self._held)


@dataclass(frozen=True, kw_only=True)
class _Beside:
    alone: GraphDurations
    cluster: Cluster
    kernels: NodeKernels

    def extra(self, durations: GraphDurations) -> tuple[Extra, int]:
        """Return the extra time of computation in a settled step, and that step's time."""
        classes = self.alone.graph.classes
        retimed = retime(durations, ranks=[int(c.members_M[0]) for c in classes])
        ranks = retimed.timeline.ranks
        found = {c.index: self._extra_of(c, ranks[int(c.members_M[0])]) for c in classes}
        return found, retimed.step_ns

    def _extra_of(self, rank_class: RankClass, seen: RankTimeline) -> NDArray[np.int64]:
        n_body = rank_class.trace.n_body
        first = seen.inner_step(n_body).start
        held = HeldBlocks(self._intervals(rank_class, seen))
        alone_B = self.alone.body(rank_class.index, 0)
        extra_B = np.zeros(n_body, dtype=np.int64)
        for node, share in self._shares[rank_class.index].items():
            pace = {n: slowdown(n, self._multiprocessors, share) for n in held.numbers}
            start, alone = int(seen.start_ns_N[first + node]), int(np.ravel(alone_B[node])[0])
            extra_B[node] = round(held.stretched_ns(start, alone, pace)) - alone
        return extra_B

    def _intervals(self, rank_class: RankClass, seen: RankTimeline) -> list[tuple[int, int, int]]:
        """Return when communications are in progress, with the blocks of each."""
        held = self._blocks[rank_class.index]
        return [
            (int(seen.start_ns_N[row]), int(seen.end_ns_N[row]), held[node])
            for row, node in seen.around_inner_step(rank_class.trace.n_body)
            if node in held
        ]

    @cached_property
    def _multiprocessors(self) -> int:
        return profile_of(self.cluster.device).multiprocessors

    @cached_property
    def _blocks(self) -> dict[int, dict[int, int]]:
        """By class and body node: multiprocessors that a communication holds."""
        return {c.index: self._blocks_of(c) for c in self.alone.graph.classes}

    def _blocks_of(self, rank_class: RankClass) -> dict[int, int]:
        trace, channels = rank_class.trace, ClassChannels(self.alone.graph, rank_class)
        gpu, known, out = gpu_key(self.cluster.device), {}, {}
        for position in trace.communications(trace.n_prologue, trace.n_nodes):
            channel, kind = channels.of(position), NodeKind(int(trace.kind_N[position]))
            if channel not in known:
                domain_KG = self.alone.places(channel) // self.cluster.devices_per_domain
                known[channel] = bool((domain_KG == domain_KG[:1]).all())
            out[position - trace.n_prologue] = blocks(kind, gpu, is_near=known[channel])
        return out

    @cached_property
    def _shares(self) -> dict[int, dict[int, float]]:
        """By class and body node: share of matrix products, of nodes that have kernels."""
        return {c.index: dict(self._shares_of(c)) for c in self.alone.graph.classes}

    def _shares_of(self, rank_class: RankClass) -> Iterator[tuple[int, float]]:
        for node in np.flatnonzero(rank_class.trace.computes_B).tolist():
            share = self.kernels.share_of(rank_class.trace, node, PRODUCT_KINDS)
            if share is not None:
                yield node, share
