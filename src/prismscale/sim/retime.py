"""The step that stands for all: the median of many.

[Note: medians do not add up] Captured steps differ, and at each collective ranks wait for whoever
is late this time. A job that takes every node's median duration has no such waits: for 1,024 ranks
of the llama example on a busy machine it was 362 ms a step where the median step was 396 ms. So the
job is re-timed with the captured steps themselves, in the order in which the virtual peers of live
ranks replay them, and the median of these steps is the one that is predicted and shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.source import DurationSource, LaterDurations
from prismscale.graph.job_graph import JobGraph
from prismscale.sim.program import compile_job
from prismscale.sim.steady import Steady
from prismscale.sim.timeline import Timeline, simulate, simulate_steady

STEPS = 4
"""Simulated steps where captured ones differ: the last one's period is shown."""
MOST_SAMPLED_STEPS = 48
"""More would say little more about the median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retimed:
    """A re-timed job. Axes: ``T`` its steady steps, which take the durations of captured ones in
    turn, ``R`` ranks."""

    timeline: Timeline
    """Its last step is typical."""
    step_ns: int
    """The steady step of the job."""
    job_step_ns_T: NDArray[np.int64]
    """What it is typical of."""
    rank_step_ns_TR: NDArray[np.int64]
    first_row: int = 0
    """The captured step whose durations the first step of :attr:`timeline` takes."""
    steady: Steady | None = None
    """How it settled, where every step has the same durations."""

    @classmethod
    def after(
        cls, timeline: Timeline, whole: Timeline, settling: int, first_row: int = 0
    ) -> Retimed:
        """The steps of ``whole``, without its first ``settling`` ones, and a timeline to show."""
        return cls(
            timeline=timeline,
            first_row=first_row,
            step_ns=timeline.step_ns,
            job_step_ns_T=whole.job_step_ns_TD[settling:, 0],
            rank_step_ns_TR=whole.rank_step_ns_TDR[settling:, 0],
        )


def retime(durations: GraphDurations, *, ranks: Iterable[int] = ()) -> Retimed:
    """The typical steady step of a job. One that hangs has none: its steps are simulated from the
    first until after the hang."""
    graph, hang = durations.graph, durations.faults.hang
    if not hang:
        return simulate_typical(graph, durations, samples=durations.n_samples, ranks=ranks)
    steps = max(STEPS, *(step + 2 for step in hang.values()))
    timeline = simulate(graph, durations, steps=steps, ranks=ranks, watch_hangs=True)
    return Retimed.after(timeline, timeline, 1)


def simulate_typical(
    graph: JobGraph,
    durations: DurationSource,
    *,
    samples: int,
    ranks: Iterable[int] = (),
) -> Retimed:
    """Re-time a job whose durations repeat after ``samples`` steps.

    Returns:
        Where all steps take the same durations: the steady step, once the job has settled.
        Otherwise a timeline of :data:`STEPS` consecutive steps, the last of which is as long as the
        median one, and the times of the steps that it is the median of, at most
        :data:`MOST_SAMPLED_STEPS`. See [Note: medians do not add up].
    """
    program = compile_job(graph)
    if samples == 1:
        timeline, steady = simulate_steady(graph, durations, ranks=ranks, program=program)
        return Retimed(
            timeline=timeline,
            step_ns=steady.step_ns,
            job_step_ns_T=timeline.job_step_ns_TD[steady.steps :, 0],
            rank_step_ns_TR=timeline.rank_step_ns_TDR[steady.steps :, 0],
            steady=steady,
        )
    settling, sampled = STEPS - 1, min(samples, MOST_SAMPLED_STEPS)
    whole = simulate(graph, durations, steps=settling + sampled, program=program)
    step_ns_T = whole.job_step_ns_TD[settling:, 0]
    # The lower median: a step that was simulated, and not the mean of two.
    typical = int(np.argsort(step_ns_T, kind="stable")[(sampled - 1) // 2])
    # Begun there, its last step takes the durations that the median step took.
    shown = LaterDurations(durations=durations, first=typical)
    timeline = simulate(graph, shown, steps=STEPS, ranks=ranks, program=program)
    return Retimed.after(timeline, whole, settling, typical)
