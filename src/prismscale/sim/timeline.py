"""The result of re-timing a job: step ends of every rank, and all nodes of a few chosen ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.source import NEVER, DurationSource
from prismscale.errors import UsageError
from prismscale.graph.job_graph import JobGraph
from prismscale.sim.engine import Engine
from prismscale.sim.program import JobProgram, compile_job
from prismscale.sim.state import Times
from prismscale.sim.steady import Steady, until_settled
from prismscale.sim.stuck import Hang

SHOWN_STEPS = 3
"""Fewest steps of a settled job whose nodes are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimeline:
    """One rank's nodes over the simulated steps, in stream order."""

    rank: int
    class_index: int
    first_position: int
    """Stream position of row 0."""
    start_ns_N: NDArray[np.int64]
    """Start of a computation, or arrival at a communication."""
    end_ns_N: NDArray[np.int64]
    ready_ns_N: NDArray[np.int64] | None = None
    """Last arrival at a communication: before it this rank waits, after it data moves. None if only
    this rank was observed, because one rank cannot tell when the others arrive."""

    @property
    def moves_from_ns_N(self) -> NDArray[np.int64]:
        """When a communication's data begins to move: at the last arrival, or at this rank's own.

        This rank's own arrival stands in if the last one is unknown.
        """
        return self.start_ns_N if self.ready_ns_N is None else self.ready_ns_N

    def inner_step(self, n_body: int) -> range:
        """Return the rows of the last step but one: the last with a step on both sides."""
        n_rows = len(self.end_ns_N)
        return range(n_rows - 2 * n_body, n_rows - n_body)

    def around_inner_step(self, n_body: int) -> Iterator[tuple[int, int]]:
        """Yield the row and the body node of all that may be in progress in :meth:`inner_step`.

        The step before may reach into it, and so may it into the step after.
        """
        n_rows = len(self.end_ns_N)
        for row in range(max(0, n_rows - 3 * n_body), n_rows):
            yield row, (row - n_rows) % n_body


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Times of a whole job. Axes: ``T`` steps, ``D`` draws, ``R`` ranks, ``N`` nodes."""

    graph: JobGraph
    step_end_ns_TDR: NDArray[np.int64]
    """When each rank ends each step; ``D`` is 1 without draws."""
    ranks: dict[int, RankTimeline]
    hangs: tuple[Hang, ...] = ()

    @property
    def job_step_ns_TD(self) -> NDArray[np.int64]:
        """Step time of the job: from the last rank's end of a step to its end of the next.

        Row 0 counts from time 0, when all ranks start together: a warm-up, not a steady step. A
        step that never ends takes :data:`NEVER`.
        """
        return _periods(self.step_end_ns_TDR.max(axis=-1))

    @property
    def rank_step_ns_TDR(self) -> NDArray[np.int64]:
        """Step time of each rank: from its own end of a step to its own end of the next.

        In a pipeline it may differ much from the job's step time. Row 0 and steps that never end
        are as in :attr:`job_step_ns_TD`.
        """
        return _periods(self.step_end_ns_TDR)

    @property
    def step_ns_D(self) -> NDArray[np.int64]:
        """Steady step time by draw: that of the last simulated step."""
        return self.job_step_ns_TD[-1]

    @property
    def step_ns(self) -> int:
        """Steady step time of the first (or only) draw."""
        return int(self.step_ns_D[0])


def _periods(end_ns_T: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the time from each end to the next, along the first axis."""
    # Two ends that never come differ by a short time only, so their difference is no step time.
    return np.where(end_ns_T >= NEVER, NEVER, np.diff(end_ns_T, axis=0, prepend=0))


class _Recorder:
    """Keeps every node of some members of one class (first draw)."""

    def __init__(self, members: NDArray[np.int64], first_position: int | None = 0) -> None:
        self._members = members
        self.first_position = first_position
        """First stream position whose node is kept; None keeps no node."""
        self._rows: dict[int, tuple[NDArray[np.int64], ...]] = {}

    def __call__(
        self, class_index: int, position: int, start: Times, ready: Times, end: Times
    ) -> None:
        if self.first_position is None or position < self.first_position:
            return
        self._rows[position] = (self._pick(start), self._pick(ready), self._pick(end))

    def _pick(self, times: Times) -> NDArray[np.int64]:
        row = times.reshape(-1, times.shape[-1])[0]
        return row if len(row) == 1 else row[self._members]

    def timelines(self, ranks: list[int], class_index: int) -> Iterable[RankTimeline]:
        order = sorted(self._rows)
        width = len(ranks)
        starts, ready, ends = (
            np.array([np.broadcast_to(self._rows[x][k], width) for x in order]) for k in range(3)
        )
        for column, rank in enumerate(ranks):
            yield RankTimeline(
                rank=rank,
                class_index=class_index,
                first_position=order[0],
                start_ns_N=starts[:, column],
                end_ns_N=ends[:, column],
                ready_ns_N=ready[:, column],
            )


def simulate(
    graph: JobGraph,
    durations: DurationSource,
    *,
    steps: int = 3,
    draws: int = 1,
    ranks: Iterable[int] = (),
    with_prologue: bool = False,
    watch_hangs: bool = False,
    kept_from: int = 0,
    program: JobProgram | None = None,
) -> Timeline:
    """Re-time ``graph`` over consecutive steps.

    Several steps are needed because ranks enter a step skewed by the one before, and prefetch
    crosses the boundary. The period of the last step is the steady step time.

    Args:
        graph: the whole job.
        durations: the durations of all nodes; see :class:`DurationSource`.
        steps: number of steps, at least 1.
        draws: length of the draw axis that ``durations`` uses; 1 for none.
        ranks: ranks of which every node is kept.
        with_prologue: start at the program's beginning instead of at its first steady step.
        watch_hangs: report groups that wait for ever.
        kept_from: step from which nodes of ``ranks`` are kept: they take memory.
        program: ``graph`` already compiled, to avoid compiling it again.

    Raises:
        UsageError: ``steps`` is below 1, or a rank is not in the job.
        StuckError: no class can advance.
    """
    if steps < 1:
        raise UsageError(f"steps is {steps}; at least 1 is needed")
    wanted = _by_class(graph, ranks)
    ends = _StepEnds(graph, draws)
    recorders = _recorders(graph, wanted)
    if kept_from:
        for class_index, recorder in recorders.items():
            trace = graph.classes[class_index].trace
            recorder.first_position = trace.n_prologue + kept_from * trace.n_body
    engine = Engine(
        program or compile_job(graph),
        durations,
        steps=steps,
        with_prologue=with_prologue,
        on_step_end=ends,
        on_node=recorders,
        watch_hangs=watch_hangs,
    )
    engine.run()
    return _timeline(graph, ends, recorders, wanted, engine)


def simulate_steady(
    graph: JobGraph,
    durations: DurationSource,
    *,
    ranks: Iterable[int] = (),
    program: JobProgram | None = None,
) -> tuple[Timeline, Steady]:
    """Re-time ``graph`` until its step has settled, and :data:`SHOWN_STEPS` or more further steps.

    The durations must be the same in every step. Nodes of ``ranks`` are kept for the further steps
    only. Raises as :func:`simulate` does.
    """
    wanted = _by_class(graph, ranks)
    ends = _StepEnds(graph, draws=1)
    recorders = _recorders(graph, wanted, first_position=None)
    job = program or compile_job(graph)
    engine = Engine(job, durations, steps=0, on_step_end=ends, on_node=recorders)
    steady = until_settled(engine, lambda: int(ends.by_step[-1].max()))
    # All classes are at the end of a step. Nodes are kept from here on.
    for class_index, recorder in recorders.items():
        recorder.first_position = engine.position_of(class_index)
    # At least a whole cycle, because fewer steps could miss its longest step.
    engine.extend(steady.steps + max(SHOWN_STEPS, steady.cycle))
    engine.run()
    return _timeline(graph, ends, recorders, wanted, engine), steady


class _StepEnds:
    """Collects when each rank ends each step: with the last node that was issued in the step."""

    def __init__(self, graph: JobGraph, draws: int) -> None:
        self._graph, self._draws = graph, draws
        self.by_step: list[NDArray[np.int64]] = []

    def __call__(self, class_index: int, step: int, end: Times) -> None:
        # Classes run independently: one may end a step while others are several steps behind.
        while step >= len(self.by_step):
            shape = (self._draws, self._graph.world_size)
            self.by_step.append(np.zeros(shape, dtype=np.int64))
        members_M = self._graph.classes[class_index].members_M
        known = self.by_step[step]
        known[:, members_M] = np.maximum(known[:, members_M], end)


def _recorders(
    graph: JobGraph, wanted: dict[int, list[int]], first_position: int | None = 0
) -> dict[int, _Recorder]:
    return {
        c: _Recorder(graph.member_of_R[np.array(members)], first_position)
        for c, members in wanted.items()
    }


def _timeline(
    graph: JobGraph,
    ends: _StepEnds,
    recorders: dict[int, _Recorder],
    wanted: dict[int, list[int]],
    engine: Engine,
) -> Timeline:
    kept = (t for c, r in recorders.items() for t in r.timelines(wanted[c], c))
    return Timeline(
        graph=graph,
        step_end_ns_TDR=np.stack(ends.by_step),
        ranks={t.rank: t for t in kept},
        hangs=tuple(engine.hangs),
    )


def _by_class(graph: JobGraph, ranks: Iterable[int]) -> dict[int, list[int]]:
    wanted: dict[int, list[int]] = {}
    for rank in sorted(set(ranks)):
        if not 0 <= rank < graph.world_size:
            raise UsageError(f"rank {rank} does not exist; ranks are 0 … {graph.world_size - 1}")
        wanted.setdefault(int(graph.class_of_R[rank]), []).append(rank)
    return wanted
