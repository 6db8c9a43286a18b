"""The step that stands for all: the median of many.

[Note: medians do not add up] Captured steps differ, and at each meeting ranks wait for whoever is
late this time. A job that takes every node's median duration has no such waits: for 1,024 ranks of
the llama example on a busy machine it was 362 ms a step where the median step was 396 ms. So the
job is re-timed with the captured steps themselves, in the order in which the virtual peers of live
ranks replay them, and the median of these steps is the one that is predicted and shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.cost.durations import GraphDurations
from prismscale.graph.job_graph import JobGraph
from prismscale.sim.engine import DurationSource
from prismscale.sim.program import compile_job
from prismscale.sim.state import Duration
from prismscale.sim.timeline import Timeline, simulate

STEPS = 4
"""Simulated steps: the last one's period is the steady step."""
MOST_SAMPLED_STEPS = 48
"""More would say little more about the median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaterDurations:
    """Durations of a job that begins with the step ``first`` of another."""

    durations: DurationSource
    first: int

    def prologue(self, class_index: int) -> Sequence[Duration]:
        """As they are: no step."""
        return self.durations.prologue(class_index)

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        """Durations of the body in ``first + step``."""
        return self.durations.body(class_index, self.first + step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Retimed:
    """A re-timed job. Axes: ``T`` its steady steps, which take the durations of captured ones in
    turn, ``R`` ranks."""

    timeline: Timeline
    """Its last step is typical."""
    job_step_ns_T: NDArray[np.int64]
    """What it is typical of."""
    rank_step_ns_TR: NDArray[np.int64]

    @classmethod
    def settled(cls, timeline: Timeline, whole: Timeline, settling: int) -> Retimed:
        """With the steps of ``whole`` but its first, which are ``settling``."""
        return cls(
            timeline=timeline,
            job_step_ns_T=whole.job_step_ns_TD[settling:, 0],
            rank_step_ns_TR=whole.rank_step_ns_TDR[settling:, 0],
        )


def retime(durations: GraphDurations, *, ranks: Iterable[int] = ()) -> Retimed:
    """The typical steady step of a job. One that hangs has none: its steps are simulated from the
    first until after the hang."""
    graph, hang = durations.graph, durations.faults.hang
    if not hang:
        samples = durations.n_samples
        return simulate_typical(graph, durations, samples=samples, steps=STEPS, ranks=ranks)
    steps = max(STEPS, *(step + 2 for step in hang.values()))
    timeline = simulate(graph, durations, steps=steps, ranks=ranks, watch_hangs=True)
    return Retimed.settled(timeline, timeline, 1)


def simulate_typical(
    graph: JobGraph,
    durations: DurationSource,
    *,
    samples: int,
    steps: int,
    ranks: Iterable[int] = (),
) -> Retimed:
    """Re-time a job whose durations repeat after ``samples`` steps.

    Returns:
        A timeline of ``steps`` consecutive steps, the last of which is as long as the median one;
        and the times of the steps that it is the median of, at most :data:`MOST_SAMPLED_STEPS`
        (where all samples are alike: of all steps but the first). See [Note: medians do not add
        up].
    """
    program = compile_job(graph)
    if samples == 1:
        timeline = simulate(graph, durations, steps=steps, ranks=ranks, program=program)
        return Retimed.settled(timeline, timeline, 1)
    settling, sampled = steps - 1, min(samples, MOST_SAMPLED_STEPS)
    whole = simulate(graph, durations, steps=settling + sampled, program=program)
    step_ns_T = whole.job_step_ns_TD[settling:, 0]
    typical = int(np.argsort(step_ns_T, kind="stable")[(sampled - 1) // 2])
    shown = LaterDurations(durations=durations, first=typical)
    timeline = simulate(graph, shown, steps=steps, ranks=ranks, program=program)
    return Retimed.settled(timeline, whole, settling)
