"""Long stalls of whole jobs in MLPerf's logs: how often, and how long.

A profile that is scored on a job must not come from that job. So what ``variation`` scores on 405B
has the long stalls of GPT-3's logs, and the other way round (:data:`SCORED`, whose figures were set
before anything was scored on them); the profile ``measured`` has those of both.

The rule. A stall is a step that takes :data:`LONG_S` more than its run's median; steps up to two
apart are one stall, whose length is their sum. Left out: a run's first :data:`WARM_UP` steps, steps
that follow an evaluation, and Oracle's jobs on 3,072 GPUs, whose pace changes by 6 % all the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from prismscale.cost.variability import StallVariation, VariabilityProfile
from prismscale.validation.mlperf import WARM_UP_STEPS, MlperfRun

LONG_S = 0.7
WARM_UP = 5
TOGETHER = 2
"""Slow steps that are at most so far apart are one stall."""
RESTLESS = ("Oracle", 3_072)
GPT3, LLAMA = "gpt3", "llama31_405b"


@dataclass(frozen=True, kw_only=True)
class LongStalls:
    """What the logs of some runs show."""

    count: int
    hours: float
    """Of all runs together."""
    mean_s: float

    @property
    def per_job_hour(self) -> float:
        """How many an hour of a job has."""
        return self.count / self.hours

    @classmethod
    def of(cls, runs: Iterable[MlperfRun]) -> LongStalls:
        """Of all of these together."""
        lengths_s: list[float] = []
        hours = 0.0
        for run in runs:
            if RESTLESS[0] in run.family and run.n_gpus == RESTLESS[1]:
                continue
            lengths_s += stalls_s(run)
            hours += float(run.steps_ns[WARM_UP - WARM_UP_STEPS :].sum()) / 3600e9
        return cls(count=len(lengths_s), hours=hours, mean_s=float(np.mean(lengths_s)))


def stalls_s(run: MlperfRun) -> list[float]:
    """Lengths of one run's long stalls, in seconds."""
    over_s = (run.steps_ns - np.median(run.steps_ns)) / 1e9
    is_long = (over_s > LONG_S) & ~run.after_event_B
    is_long[: WARM_UP - WARM_UP_STEPS] = False
    found: list[float] = []
    last = -TOGETHER - 1
    for step in np.flatnonzero(is_long).tolist():
        if step - last > TOGETHER:
            found.append(0.0)
        found[-1] += float(over_s[step])
        last = step
    return found


SCORED = {
    LLAMA: StallVariation(long_per_job_hour=0.13, long_mean_s=2.8),
    GPT3: StallVariation(long_per_job_hour=0.56, long_mean_s=5.1),
}
"""By job that is scored: long stalls of the other's logs."""


def without_the_job(bench: str) -> VariabilityProfile:
    """The profile ``measured`` with nothing in it of the job that is scored."""
    profile, own = VariabilityProfile.load("measured"), SCORED[bench]
    stalls = replace(
        profile.stalls, long_per_job_hour=own.long_per_job_hour, long_mean_s=own.long_mean_s
    )
    return replace(profile, name=f"measured-without-{bench}", stalls=stalls)
