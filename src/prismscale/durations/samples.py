"""Durations of several recorded steps of one job, to be replayed or recombined.

The graph holds the structure once; :class:`StepSamples` holds the duration of each node in each
recorded step on each recorded rank. The duration of a communication is stored once for all members
of a group, so a recombined step draws it once for all of them.

Array axes: ``T`` recorded steps, ``C`` columns (recorded ranks of a class), ``M`` members of a
class, ``G`` groups of a family, ``B`` body nodes, ``R`` ranks, ``D`` draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.source import Duration
from prismscale.errors import FormatError, UsageError
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.pipeline import pipeline_places
from prismscale.graph.trace import RankTrace

NO_MICROBATCH = -1
"""Microbatch of a node that belongs to none, or whose microbatch the recording does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSignature:
    """Key of a duration pool (PRISM): the durations of nodes with equal signatures may be mixed."""

    label: str
    kind: NodeKind
    op: CollectiveOp
    """Meaningless for computation."""
    lane: str
    n_bytes: int
    group: str
    """Name of the process group; empty for computation."""
    group_size: int
    group_stride: int
    """Distance between the group's first two ranks, which tells the links that it crosses; 0 for
    computation and groups of one."""
    stage: int
    """Pipeline stage; -1 unknown."""
    peer: int
    """Relative peer of a send or receive, root of a rooted collective, else -1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassSamples:
    """Recorded durations of one class."""

    body_ns: tuple[NDArray[np.int64], ...]
    """One array per body node. Computation: ``[T, C]``, by column. Communication: ``[T, G]``, by
    group of the family, or ``[T, 1]`` where all groups take the same. A communication is read from
    one class only: that of group rank 0, or of the sender."""
    column_M: NDArray[np.int64]
    """Column of each member: its own, or that of the recorded rank that stands for it."""
    microbatch_B: NDArray[np.int32]
    """Microbatch of each body node, :data:`NO_MICROBATCH` where it has none."""
    prologue_ns: tuple[int, ...] = ()

    @property
    def n_columns(self) -> int:
        """Number of recorded ranks of the class."""
        return int(self.column_M.max()) + 1


class StepChoice(Protocol):
    """Which recorded step each duration of a recombined step comes from."""

    def steps(self, class_index: int, node: int) -> NDArray[np.int64]:
        """Return step indices that broadcast to ``[D, M]`` (computation) or ``[D, G]``."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepSamples:
    """A job's graph with the durations of ``T`` recorded steps."""

    graph: JobGraph
    step_ids: tuple[int, ...]
    """The recording's own step numbers."""
    classes: tuple[ClassSamples, ...]
    stage_R: NDArray[np.int64]
    """Pipeline stage of each rank; -1 unknown."""
    replica_R: NDArray[np.int64]
    """Pipeline replica of each rank; ranks of one replica share microbatches."""
    observed_step_ns_T: NDArray[np.int64] | None = None
    """Step times as recorded, where the recording covers every rank."""

    def __post_init__(self) -> None:
        if not self.step_ids:
            raise UsageError("no recorded step; at least one is needed")
        if len(set(self.step_ids)) != len(self.step_ids):
            raise UsageError(f"step ids {self.step_ids} repeat; each step may appear once")
        for rank_class, samples in zip(self.graph.classes, self.classes, strict=True):
            shapes = {a.shape[0] for a in samples.body_ns}
            if len(samples.body_ns) != rank_class.trace.n_body or shapes - {self.n_steps}:
                raise UsageError(
                    f"class {rank_class.index}: durations for {len(samples.body_ns)} nodes of "
                    f"{sorted(shapes)} steps; {rank_class.trace.n_body} nodes of {self.n_steps} "
                    "steps are needed"
                )
            if any((a < 0).any() for a in samples.body_ns):
                raise FormatError(f"class {rank_class.index}: negative duration in a recorded step")

    @property
    def n_steps(self) -> int:
        """Number of recorded steps."""
        return len(self.step_ids)

    def durations(self, step_index: int) -> RecombinedDurations:
        """Return the durations of one recorded step; ``simulate(graph, …, steps=1)`` replays it.

        Raises:
            UsageError: there is no such step.
        """
        if not 0 <= step_index < self.n_steps:
            raise UsageError(f"step index {step_index}; recorded are 0 … {self.n_steps - 1}")
        return RecombinedDurations(samples=self, choice=_OneStep(step_index))

    def recombined(self, choice: StepChoice) -> RecombinedDurations:
        """Return durations in which each node's may come from another step.

        They have a draw axis if ``choice`` has one.
        """
        return RecombinedDurations(samples=self, choice=choice)

    def select(self, step_indices: Sequence[int]) -> StepSamples:
        """Return the samples of only some of the steps, in the given order."""
        rows = np.asarray(step_indices, dtype=np.int64)
        observed = self.observed_step_ns_T
        return replace(
            self,
            step_ids=tuple(self.step_ids[i] for i in step_indices),
            classes=tuple(
                replace(c, body_ns=tuple(a[rows] for a in c.body_ns)) for c in self.classes
            ),
            observed_step_ns_T=None if observed is None else observed[rows],
        )

    def recorded_as(
        self, step_ids: Sequence[int], observed_step_ns_T: NDArray[np.int64]
    ) -> StepSamples:
        """Return the same durations with the recording's own step numbers and step times."""
        return replace(
            self, step_ids=tuple(step_ids), observed_step_ns_T=observed_step_ns_T.astype(np.int64)
        )

    def signature(self, class_index: int, node: int) -> NodeSignature:
        """Return the pool key of body node ``node``; equal work on any rank or step has one key."""
        rank_class = self.graph.classes[class_index]
        trace = rank_class.trace
        i = trace.n_prologue + node
        kind, group_index = NodeKind(int(trace.kind_N[i])), int(trace.group_index_N[i])
        is_compute = kind == NodeKind.COMPUTE
        ranks = () if is_compute else trace.groups[group_index].ranks
        return NodeSignature(
            label=trace.labels[int(trace.label_N[i])],
            kind=kind,
            op=CollectiveOp(int(trace.op_N[i])),
            lane=trace.lanes[int(trace.lane_N[i])],
            n_bytes=int(trace.bytes_N[i]),
            group="" if is_compute else trace.groups[group_index].name,
            group_size=len(ranks),
            group_stride=abs(ranks[1] - ranks[0]) if len(ranks) > 1 else 0,
            stage=int(self.stage_R[rank_class.members_M[0]]),
            peer=int(trace.peer_N[i]),
        )

    @staticmethod
    def from_graph(graph: JobGraph) -> StepSamples:
        """Return the samples of a graph whose traces hold several steps (``body_ns_SB``).

        Each class has one column. Classes with different numbers of steps are cut to the smallest.
        """
        n_steps = min(c.trace.n_samples for c in graph.classes)
        stage_R, replica_R = pipeline_places(graph)
        return StepSamples(
            graph=graph,
            step_ids=tuple(range(n_steps)),
            classes=tuple(
                _class_samples([c.trace], np.zeros(c.size, dtype=np.int64), n_steps)
                for c in graph.classes
            ),
            stage_R=stage_R,
            replica_R=replica_R,
        )


def _class_samples(
    traces: Sequence[RankTrace], column_M: NDArray[np.int64], n_steps: int
) -> ClassSamples:
    first = traces[0]
    stacked_TBC = np.stack([t.body_ns_SB[:n_steps] for t in traces], axis=-1)
    return ClassSamples(
        body_ns=tuple(
            # A communication takes the time that its quickest recorded member saw: the others saw
            # waiting on top of it.
            stacked_TBC[:, b] if computes else stacked_TBC[:, b].min(axis=-1, keepdims=True)
            for b, computes in enumerate(first.computes_B.tolist())
        ),
        column_M=column_M,
        microbatch_B=np.full(first.n_body, NO_MICROBATCH, dtype=np.int32),
        prologue_ns=tuple(first.prologue_ns.tolist()),
    )


@dataclass(frozen=True, kw_only=True)
class RecombinedDurations:
    """Durations of a step that is composed of recorded ones (a ``DurationSource``)."""

    samples: StepSamples
    choice: StepChoice

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """Return the durations of the prologue, the same in every draw."""
        return self.samples.classes[class_index].prologue_ns

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Return the durations of the body, the same in every simulated step."""
        own = self.samples.classes[class_index]
        kinds = self._kinds(class_index)
        out: list[Duration] = []
        for node, ns_TX in enumerate(own.body_ns):
            rows = self.choice.steps(class_index, node)
            if ns_TX.shape[1] == 1:
                out.append(ns_TX[rows, 0])
            elif kinds[node] == NodeKind.COMPUTE:
                out.append(ns_TX[rows, own.column_M])
            else:
                out.append(ns_TX[rows, np.arange(ns_TX.shape[1])])
        return out

    def _kinds(self, class_index: int) -> NDArray[np.uint8]:
        trace = self.samples.graph.classes[class_index].trace
        return trace.kind_N[trace.n_prologue :]


class _OneStep:
    def __init__(self, step_index: int) -> None:
        self._row = np.array([step_index], dtype=np.int64)

    def steps(self, class_index: int, node: int) -> NDArray[np.int64]:
        return self._row
