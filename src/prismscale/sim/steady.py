"""When has a re-timed job settled, and how long is its step then?

Re-timing is linear in the (max, +) algebra: the times at the end of one step follow from those at
the end of the step before by maxima and sums. What such a system grows by in the long run, the
largest cycle mean of the graph that repeats, is the steady step: of the host, of a stream, of a
link, of a pipeline, whichever is the slowest cycle through the job (Baccelli, Cohen, Olsder and
Quadrat, Synchronization and Linearity, 1992, chapter 3).

[Note: settled] Look at the last ``c`` steps and the ``c`` before. Let ``G`` be by how much the
job's end grew over the last, and let no time that a later step can still ask for have grown more
than ``G`` over either. If all that grew by ``G`` over the first grew by ``G`` over the last, too,
the job grows by ``G`` every ``c`` steps for ever:

- It cannot grow faster. The largest growth of any time never rises: each follows the latest of
  some, and those grew by no more (Collatz and Wielandt).
- It cannot grow slower. What grew by ``G`` followed something that grew by as much over the ``c``
  steps before, and so, as supposed, grew by as much since: what follows it will again.

Parts of the job that nothing holds back may run at a pace of their own: a host that issues ahead of
its device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from prismscale.durations.source import DurationSource
from prismscale.sim.engine import Engine, EngineState
from prismscale.sim.program import JobProgram
from prismscale.sim.state import Times

MOST_STEPS = 96
"""Simulated steps after which a job that has not settled is shown as it is; the result says so."""
LONGEST_CYCLE = 8
"""Steps after which times may repeat, for the job to count as settled."""
FEWEST_KEPT = 5
"""Steps whose ends are kept at least, the last one among them: two cycles of two steps."""
MOST_BYTES = 2**30
"""Bytes of kept ends. Beyond it the oldest are dropped, and only shorter cycles are found."""

Ends = dict[tuple[int, int], Times]
"""Ends that later steps ask for: by class, and distance back from where the class stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady:
    """How a job settled."""

    steps: int
    """Simulated steps until the job had settled."""
    cycle: int = 1
    """Steps after which all times repeat, later by a constant."""
    cycle_ns: int
    """That constant: what a cycle takes."""
    settled: bool = True

    @property
    def step_ns(self) -> int:
        """The steady step."""
        return round(self.cycle_ns / self.cycle)


class SteadyWatch:
    """Looks at an engine each time that all its classes have ended a step."""

    def __init__(self) -> None:
        # Now, a longest cycle ago and two ago: see [Note: settled].
        self._ends: deque[Ends] = deque(maxlen=2 * LONGEST_CYCLE + 1)
        self._job_end_ns: list[int] = []

    def look(self, engine: Engine, job_end_ns: int) -> Steady | None:
        """How the job has settled; None while it has not.

        Args:
            engine: all of its classes stand at the end of a step.
            job_end_ns: when the last rank ended that step.
        """
        self._ends.append(engine.ends_asked_for())
        while len(self._ends) > FEWEST_KEPT and _bytes(self._ends) > MOST_BYTES:
            self._ends.popleft()
        self._job_end_ns.append(job_end_ns)
        done = len(self._job_end_ns)
        # The shortest cycle first: its multiples repeat as well.
        for cycle in range(1, (len(self._ends) - 1) // 2 + 1):
            grown_ns = job_end_ns - self._job_end_ns[-1 - cycle]
            if self._repeats(cycle, grown_ns):
                return Steady(steps=done, cycle=cycle, cycle_ns=grown_ns)
        if done < MOST_STEPS:
            return None
        # Given up: the mean of the later half stands for the step.
        half = done // 2
        grown_ns = job_end_ns - self._job_end_ns[half - 1]
        return Steady(steps=done, cycle=done - half, cycle_ns=grown_ns, settled=False)

    def _repeats(self, cycle: int, grown_ns: int) -> bool:
        """See [Note: settled]."""
        now, then, before = (self._ends[-1 - n * cycle] for n in range(3))
        # In the first steps some of the ends that later steps ask for do not exist yet.
        if not now.keys() == then.keys() == before.keys():
            return False
        for key, end_M in now.items():
            last, first = end_M - then[key], then[key] - before[key]
            if (last > grown_ns).any() or (first > grown_ns).any():
                return False
            if ((first == grown_ns) & (last < grown_ns)).any():
                return False
        return True


def until_settled(engine: Engine, job_end_ns: Callable[[], int]) -> Steady:
    """Run ``engine``, which has run no step yet, until its job has settled, or is given up.

    Args:
        engine: see :class:`SteadyWatch`.
        job_end_ns: when the last rank ended the step that was run last.
    """
    watch, steady, done = SteadyWatch(), None, 0
    while steady is None:
        done += 1
        engine.extend(done)
        engine.run()
        steady = watch.look(engine, job_end_ns())
    return steady


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


def settle(job: JobProgram, durations: DurationSource) -> Start:
    """Simulate until the step has settled.

    Of a job that does not settle, until the steps begin whose mean is shown as its step.
    """
    engine = Engine(job, durations, steps=0, on_step_end=(ends := _LastStep()))
    steady = until_settled(engine, lambda: ends.job_end_ns)
    steps, cycle = steady.steps, steady.cycle
    if not steady.settled:
        return replace(simulated(job, durations, steps - cycle), cycle=cycle)
    return Start(state=engine.standing(), steps=steps, end_ns=ends.job_end_ns, cycle=cycle)


def simulated(job: JobProgram, durations: DurationSource, steps: int) -> Start:
    """Simulate so many steps."""
    engine = Engine(job, durations, steps=0, on_step_end=(ends := _LastStep()))
    for done in range(1, steps + 1):
        engine.extend(done)
        engine.run()
    return Start(state=engine.standing(), steps=steps, end_ns=ends.job_end_ns)


class _LastStep:
    """Hears of ends, and keeps the job's end of the last step."""

    def __init__(self) -> None:
        self.job_end_ns = 0
        self._step = 0

    def __call__(self, class_index: int, step: int, end: Times) -> None:
        # A step may end before the one before it, whose last work nothing in it waits for.
        before_ns = self.job_end_ns if step == self._step else 0
        self._step, self.job_end_ns = step, max(before_ns, int(end.max()))


def _bytes(kept: Iterable[Ends]) -> int:
    return sum(times.nbytes for ends in kept for times in ends.values())
