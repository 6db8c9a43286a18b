"""Re-times a job and finds the step that is typical of it: the median of many.

[Note: medians do not add up] Captured steps differ, and at each collective ranks wait for whichever
rank is late this time. A job in which every node takes its median duration has no such waits: for
1,024 ranks of the llama example on a busy machine its step was 362 ms, and the median step was 396
ms. So the job is re-timed with the captured steps themselves, in the order in which the virtual
peers of live ranks replay them. The median of these steps is the one that is predicted and shown.
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
"""Steps of the shown timeline if captured steps differ; the period of the last one is shown."""
KEPT_BEFORE_HANG = 8
"""Steps before a hang whose nodes are kept; reports show two of them."""
MOST_SAMPLED_STEPS = 48
"""Most captured steps that are simulated. More would say little more about the median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retimed:
    """A re-timed job.

    Axes: ``T`` steady steps, which take the durations of the captured steps in turn; ``R`` ranks.
    """

    timeline: Timeline
    """The timeline to show. Its last step is the typical one."""
    step_ns: int
    """Duration of the job's steady step."""
    job_step_ns_T: NDArray[np.int64]
    """Job step times of the steady steps, of which :attr:`step_ns` is typical."""
    rank_step_ns_TR: NDArray[np.int64]
    first_row: int = 0
    """Row of the captured step whose durations the first step of :attr:`timeline` takes."""
    steady: Steady | None = None
    """How the job settled, if every step has the same durations; otherwise None."""

    @classmethod
    def after(
        cls, timeline: Timeline, whole: Timeline, settling: int, first_row: int = 0
    ) -> Retimed:
        """Combine a timeline to show with all but the first ``settling`` steps of ``whole``."""
        return cls(
            timeline=timeline,
            first_row=first_row,
            step_ns=timeline.step_ns,
            job_step_ns_T=whole.job_step_ns_TD[settling:, 0],
            rank_step_ns_TR=whole.rank_step_ns_TDR[settling:, 0],
        )


def retime(durations: GraphDurations, *, ranks: Iterable[int] = ()) -> Retimed:
    """Find the typical steady step of a job.

    A job that hangs has none. Its steps are simulated from the first one until after the hang.
    """
    graph, hang = durations.graph, durations.faults.hang
    if not hang:
        return simulate_typical(graph, durations, samples=durations.n_samples, ranks=ranks)
    steps = max(STEPS, *(step + 2 for step in hang.values()))
    kept_from = max(0, min(hang.values()) - KEPT_BEFORE_HANG)
    timeline = simulate(
        graph, durations, steps=steps, ranks=ranks, watch_hangs=True, kept_from=kept_from
    )
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
        The steady step of the settled job, if all steps take the same durations. Otherwise a
        timeline of :data:`STEPS` consecutive steps from a common start, the last of which has the
        durations of the median step, and the times of the steps whose median it is, at most
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
    # The lower median, because it is a step that was simulated and not the mean of two.
    typical = int(np.argsort(step_ns_T, kind="stable")[(sampled - 1) // 2])
    # If simulation begins there, its last step takes the durations that the median step took.
    shown = LaterDurations(durations=durations, first=typical)
    timeline = simulate(graph, shown, steps=STEPS, ranks=ranks, program=program)
    return Retimed.after(timeline, whole, settling, typical)
