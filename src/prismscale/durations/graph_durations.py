"""Durations for every node of a job graph: measured computation, modelled communication.

A run has one :class:`~prismscale.durations.source.DurationSource`: the captured durations, on the
cluster and with the faults that the run names. Every command evaluates this source or draws random
variation around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.collective import CollectiveModel
from prismscale.durations.faults import Faults
from prismscale.durations.samples import NO_MICROBATCH, ClassSamples, StepSamples
from prismscale.durations.source import NEVER, Duration, scaled, slowed
from prismscale.errors import UsageError
from prismscale.graph.channels import ChannelKey, ClassChannels
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.pipeline import pipeline_places
from prismscale.graph.pooling import first_own_step


@dataclass(kw_only=True)
class GraphDurations:
    """Durations of a graph's nodes, by class.

    Computation takes the trace's samples: the median over steps (``sampled=False``), or step by
    step in the order of capture (``sampled=True``). A live rank's peers replay the latter, so that
    their step-to-step variation is the real one; see [Note: own steps] in ``graph/pooling.py``.
    Communication takes the trace's duration where it was measured, else the collective model's.
    """

    graph: JobGraph
    model: CollectiveModel
    faults: Faults = field(default_factory=Faults)
    sampled: bool = False
    compute_scale: float = 1.0
    """Factor on all computation: how much faster or slower the target computes."""
    links_of: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    """Ranks (``[K, 1]``), by family, whose places in the cluster all groups of the family are taken
    to have. Groups of a family that is not listed have their own places."""
    shared_ns: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    """Time that sharing links adds to modelled communications (``[B]``), by class; see
    :mod:`prismscale.sim.shared_links`."""
    beside_ns: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)
    """Time that computation takes longer beside communications (``[B]``), by class; see
    :mod:`prismscale.sim.shared_compute`."""

    def __post_init__(self) -> None:
        self.faults.check(self.graph.world_size)
        # The order matters: each table is computed from those above it.
        self._communication = [self._communication_ns(c) for c in self.graph.classes]
        self._made = [self._really_made(c) for c in self.graph.classes]
        self._factors = [self._slow_factors(c) for c in self.graph.classes]
        self._hangs = [self._hang_steps(c) for c in self.graph.classes]
        self._prologues = [self._prologue(c) for c in self.graph.classes]
        self._bodies = [self._body_samples(c) for c in self.graph.classes]

    @property
    def n_samples(self) -> int:
        """Steps after which the durations of the class with most steps repeat; 1 if none differ."""
        return max((len(samples) for samples in self._bodies), default=1)

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """Return the durations of the prologue, by template node."""
        return self._prologues[class_index]

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Return the durations of the body in ``step``, by body node."""
        samples = self._bodies[class_index]
        body = self._slowed(class_index, step % len(samples))
        hanging = self._hangs[class_index].get(step)
        if hanging is None:
            return body
        stopped = np.where(hanging, NEVER, 0).astype(np.int64)
        # A rank that hangs never ends the first computation of its step. A communication has one
        # duration for all of its group, so that a rank cannot be late in it by itself.
        first = int(np.argmax(self.graph.classes[class_index].trace.computes_B))
        return [*body[:first], body[first] + stopped, *body[first + 1 :]]

    def _slowed(self, class_index: int, row: int) -> Sequence[Duration]:
        """Return a row of the class's samples, with the factors of its slow members."""
        body, factor_M = self._bodies[class_index][row], self._factors[class_index]
        if factor_M is None:
            return body
        return slowed(body, self.graph.classes[class_index].trace.computes_B, factor_M)

    def samples(self) -> StepSamples:
        """Return all rows as one table, from which forecasts recombine steps.

        The factors of slow ranks are not applied. Classes with fewer rows repeat them.
        """
        n_steps = self.n_samples
        stage_R, replica_R = pipeline_places(self.graph)
        return StepSamples(
            graph=self.graph,
            step_ids=tuple(range(n_steps)),
            classes=tuple(
                _table(rank_class, self._bodies[rank_class.index], n_steps)
                for rank_class in self.graph.classes
            ),
            stage_R=stage_R,
            replica_R=replica_R,
        )

    def is_modelled(self, class_index: int, node: int) -> bool:
        """Return whether a communication of the body takes its time from the model alone."""
        return not self.graph.classes[class_index].trace.body_ns_SB[:, node].any()

    def communication_ns(self, class_index: int, node: int) -> NDArray[np.int64]:
        """Return the duration of a communication, by group of its family."""
        return np.atleast_1d(self._communication[class_index][node])

    def _communication_ns(self, rank_class: RankClass) -> dict[int, Duration]:
        trace, out = rank_class.trace, {}
        ops, sizes = trace.op_N.tolist(), trace.bytes_N.tolist()
        channels = ClassChannels(self.graph, rank_class)
        # A step repeats the same few communications thousands of times.
        cache: dict[tuple[ChannelKey, int, int], Duration] = {}
        for node in trace.communications(0, trace.n_nodes):
            what = (channels.of(node), ops[node], sizes[node])
            if what not in cache:
                cache[what] = self._modelled_ns(*what)
            out[node] = cache[what]
        extra_B = self.shared_ns.get(rank_class.index, np.zeros(0, dtype=np.int64))
        for body_node in np.flatnonzero(extra_B).tolist():
            node = trace.n_prologue + body_node
            out[node] = _compact(np.atleast_1d(out[node] + extra_B[body_node]))
        return out

    def _really_made(self, rank_class: RankClass) -> frozenset[int]:
        """Find the body's communications whose measured duration needs no model.

        All their participants were timed together, as close together as on the target, and the
        model's time is the same for all groups.
        """
        trace, known = rank_class.trace, self._communication[rank_class.index]
        together = trace.co_measured_with
        if not together:
            return frozenset()
        return frozenset(
            node
            for node in trace.communications(trace.n_prologue, trace.n_nodes)
            if together.issuperset(trace.participants(node)) and not np.ndim(known[node])
        )

    def _modelled_ns(self, channel: ChannelKey, op: int, n_bytes: int) -> Duration:
        table = self.places(channel)
        return _compact(self.model.duration_ns(CollectiveOp(op), n_bytes, table))

    def places(self, channel: ChannelKey) -> NDArray[np.int64]:
        """Return the ranks (``[K, G]``) whose places the participants of a channel take.

        These are the participants' own ranks, unless :attr:`links_of` lists their family.
        """
        own = self.graph.families[channel.family].ranks_KG
        table = self.links_of.get(channel.family, own)
        return table[[channel.source, channel.destination]] if channel.is_p2p else table

    def _slow_factors(self, rank_class: RankClass) -> NDArray[np.float64] | None:
        factors = self.faults.factors(self.graph.world_size)[rank_class.members_M]
        return None if (factors == 1).all() else factors

    def _hang_steps(self, rank_class: RankClass) -> dict[int, NDArray[np.bool_]]:
        steps: dict[int, NDArray[np.bool_]] = {}
        for rank, step in self.faults.hang.items():
            here = rank_class.members_M == rank
            if here.any() and not rank_class.trace.computes_B.any():
                raise UsageError(
                    f"--hang {rank}@step{step}: that rank computes nothing in a step, so it can "
                    "stop nowhere; name another one"
                )
            if here.any():
                steps[step] = steps.get(step, np.zeros(rank_class.size, dtype=bool)) | here
        return steps

    def _prologue(self, rank_class: RankClass) -> Sequence[Duration]:
        durations = rank_class.trace.prologue_ns
        row = self._row(rank_class, durations[np.newaxis], durations, 0)
        factor_M = self._factors[rank_class.index]
        if factor_M is None:
            return row
        return slowed(row, rank_class.trace.kind_N[: len(row)] == NodeKind.COMPUTE, factor_M)

    def _body_samples(self, rank_class: RankClass) -> list[list[Duration]]:
        trace = rank_class.trace
        rows = trace.body_ns_SB
        # The mean is over all samples: below they become one row, or are distributed over members.
        mean = np.rint(rows.mean(axis=0)).astype(np.int64)
        if not self.sampled or (rows == rows[:1]).all():
            rows = np.median(rows, axis=0, keepdims=True).astype(np.int64)
            return [self._body_row(rank_class, rows, mean)]
        # See [Note: own steps] in graph/pooling.py: a member replays its own rows first, then those
        # of the next member.
        steps_M = first_own_step(trace, rank_class.members_M)
        return [
            self._body_row(rank_class, rows[(steps_M + k) % len(rows)], mean)
            for k in range(len(rows))
        ]

    def _body_row(
        self,
        rank_class: RankClass,
        durations_MB: NDArray[np.int64],
        mean_ns: NDArray[np.int64],
    ) -> list[Duration]:
        """Return the durations of the body, with what computation loses to communication."""
        row = self._row(rank_class, durations_MB, mean_ns, rank_class.trace.n_prologue)
        extra_B = self.beside_ns.get(rank_class.index)
        if extra_B is None:
            return row
        return [ns + extra for ns, extra in zip(row, extra_B.tolist(), strict=True)]

    def _row(
        self,
        rank_class: RankClass,
        durations_MB: NDArray[np.int64],
        mean_ns: NDArray[np.int64],
        offset: int,
    ) -> list[Duration]:
        """Return the durations of the nodes from ``offset`` on.

        ``durations_MB`` has a row per member, or one row for all members. ``mean_ns`` is the mean
        of each node over all samples.
        """
        kinds = rank_class.trace.kind_N[offset : offset + len(mean_ns)].tolist()
        known = self._communication[rank_class.index]
        is_share = rank_class.trace.facts.has_own_share
        made = self._made[rank_class.index]
        out: list[Duration] = []
        for i, (kind, duration) in enumerate(zip(kinds, durations_MB[0].tolist(), strict=True)):
            # All members of a group share one duration of a communication: that of the first row.
            if kind != NodeKind.COMPUTE and is_share and offset + i not in made:
                out.append(_lifted(duration, int(mean_ns[i]), known[offset + i]))
            elif kind != NodeKind.COMPUTE:
                # A measured communication keeps its measurement.
                out.append(duration or known[offset + i])
            elif len(durations_MB) == 1:
                out.append(round(duration * self.compute_scale))
            else:
                out.append(scaled(durations_MB[:, i], self.compute_scale))
        return out


def _table(rank_class: RankClass, rows: list[list[Duration]], n_steps: int) -> ClassSamples:
    """Convert rows of durations to a table by node: ``[T, 1]`` where one value serves all."""
    own = [rows[k % len(rows)] for k in range(n_steps)]
    body_ns = tuple(_stacked([row[b] for row in own]) for b in range(rank_class.trace.n_body))
    computes = rank_class.trace.computes_B.tolist()
    by_member = any(
        is_compute and ns_TX.shape[1] > 1
        for ns_TX, is_compute in zip(body_ns, computes, strict=True)
    )
    column_M = np.arange(rank_class.size) if by_member else np.zeros(rank_class.size, np.int64)
    return ClassSamples(
        body_ns=body_ns,
        column_M=column_M,
        microbatch_B=np.full(rank_class.trace.n_body, NO_MICROBATCH, dtype=np.int32),
        prologue_ns=tuple(rank_class.trace.prologue_ns.tolist()),
    )


def _stacked(values: Sequence[Duration]) -> NDArray[np.int64]:
    rows = [np.atleast_1d(np.asarray(value, dtype=np.int64)) for value in values]
    return np.stack(np.broadcast_arrays(*rows)) if len(rows) > 1 else rows[0][np.newaxis]


def _lifted(share_ns: int, mean_ns: int, modelled: Duration) -> Duration:
    """Raise a rank's measured share of a communication to the modelled time, where that is longer.

    The share took ``share_ns`` in this sample and ``mean_ns`` on average. The result's mean is at
    least the modelled time, and its scatter is the measured one. (The larger of share and modelled
    time in each sample would have a mean above both.)
    """
    if mean_ns == 0:
        return modelled
    lifted = share_ns + np.maximum(0, modelled - mean_ns)
    return lifted if np.ndim(lifted) else int(lifted)


def _compact(duration_G: NDArray[np.int64]) -> Duration:
    """Return one int where all groups take the same time: the engine then never expands it."""
    first = int(duration_G[0])
    return first if bool((duration_G == first).all()) else duration_G
