"""When has a re-timed job settled, and how long is its step then?

Re-timing is linear in the (max, +) algebra: the times at the end of one step follow from those at
the end of the step before by maxima and sums. What such a system grows by in the long run, the
largest cycle mean of the graph that repeats, is the steady step: of the host, of a stream, of a
link, of a pipeline, whichever is the slowest cycle through the job (Baccelli, Cohen, Olsder and
Quadrat, Synchronization and Linearity, 1992, chapter 3).

[Note: settled] After ``c`` steps every time that a later step can still ask for has grown by the
same amount: then all later steps repeat these, exactly. Or each has grown by as much as in the step
before, and none by more than the job's end: parts of the job that nothing holds back (a host that
issues ahead of its device) run at a pace of their own. The largest growth of any of them bounds the
cycle mean from above (Collatz and Wielandt), the job's own from below, so the step is exact here,
too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from prismscale.durations.source import DurationSource
from prismscale.sim.engine import Engine, EngineState
from prismscale.sim.program import JobProgram
from prismscale.sim.state import Times

MOST_STEPS = 96
"""A job that has not settled by then is shown as it is, and said so."""
LONGEST_CYCLE = 8
"""Steps after which times may repeat, for the job to count as settled."""

Ends = dict[tuple[int, int], Times]
"""Ends that later steps ask for: by class, and distance back from where the class stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady:
    """How a job settled."""

    steps: int
    """Simulated until it had."""
    cycle: int = 1
    """Steps after which all times repeat, but for a constant."""
    cycle_ns: int
    """That constant."""
    settled: bool = True

    @property
    def step_ns(self) -> int:
        """The steady step."""
        return round(self.cycle_ns / self.cycle)


class SteadyWatch:
    """Looks at an engine each time that all its classes have ended a step."""

    def __init__(self) -> None:
        self._ends: deque[Ends] = deque(maxlen=LONGEST_CYCLE + 1)
        self._job_end_ns: list[int] = []

    def look(self, engine: Engine, job_end_ns: int) -> Steady | None:
        """How the job has settled; None while it has not.

        Args:
            engine: all of its classes stand at the end of a step.
            job_end_ns: when the last rank ended that step.
        """
        self._ends.append(engine.ends_asked_for())
        self._job_end_ns.append(job_end_ns)
        done = len(self._job_end_ns)
        for cycle in range(1, min(LONGEST_CYCLE, len(self._ends) - 1) + 1):
            grown_ns = job_end_ns - self._job_end_ns[-1 - cycle]
            if self._repeats(cycle, grown_ns):
                return Steady(steps=done, cycle=cycle, cycle_ns=grown_ns)
        if done < MOST_STEPS:
            return None
        half = done // 2
        grown_ns = job_end_ns - self._job_end_ns[half - 1]
        return Steady(steps=done, cycle=done - half, cycle_ns=grown_ns, settled=False)

    def _repeats(self, cycle: int, grown_ns: int) -> bool:
        """See [Note: settled]."""
        growth = _growth(self._ends[-1], self._ends[-1 - cycle])
        if growth is None:
            return False
        if all((g == grown_ns).all() for g in growth.values()):
            return True
        if cycle > 1 or len(self._ends) < 3 or any((g > grown_ns).any() for g in growth.values()):
            return False
        before = _growth(self._ends[-2], self._ends[-3])
        return before is not None and all(np.array_equal(g, before[k]) for k, g in growth.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where a simulation stands that others go on from: a job that has settled, mostly."""

    state: EngineState
    steps: int
    """Simulated so far."""
    end_ns: int
    """When the job ended the last of them."""
    cycle: int = 1
    """Steps after which times repeat, see :class:`Steady`."""


def settle(job: JobProgram, durations: DurationSource, *, after: Start | None = None) -> Start:
    """Simulate until the step has settled, from the beginning or from where another stood."""
    watch = SteadyWatch()
    return _simulated(job, durations, lambda engine, end_ns, _: watch.look(engine, end_ns), after)


def simulated(job: JobProgram, durations: DurationSource, steps: int) -> Start:
    """Simulate so many steps from the beginning."""

    def enough(_: Engine, end_ns: int, done: int) -> Steady | None:
        return Steady(steps=done, cycle_ns=end_ns) if done == steps else None

    return _simulated(job, durations, enough, None)


def _simulated(
    job: JobProgram,
    durations: DurationSource,
    look: Callable[[Engine, int, int], Steady | None],
    after: Start | None,
) -> Start:
    done, end_ns = (after.steps, after.end_ns) if after else (0, 0)

    def step_end(_: int, __: int, end: Times) -> None:
        nonlocal end_ns
        end_ns = max(end_ns, int(end.max()))

    start = after.state if after else None
    engine = Engine(job, durations, steps=done, on_step_end=step_end, start=start)
    while True:
        done += 1
        engine.extend(done)
        engine.run()
        steady = look(engine, end_ns, done)
        if steady is not None:
            return Start(state=engine.standing(), steps=done, end_ns=end_ns, cycle=steady.cycle)


def _growth(now: Ends, then: Ends) -> Ends | None:
    """By how much each time has grown; None where they are not the same nodes."""
    if now.keys() != then.keys():
        return None
    return {key: times - then[key] for key, times in now.items()}
