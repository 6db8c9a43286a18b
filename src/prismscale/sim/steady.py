"""Finds when a re-timed job has settled, and how long its step is then.

Re-timing is linear in the (max, +) algebra: the times at the end of one step follow from those at
the end of the step before by maxima and sums. In the long run such a system grows per step by the
largest cycle mean of the repeating graph. This is the steady step. The slowest cycle may run
through the host, a stream, a link or a pipeline (Baccelli, Cohen, Olsder and Quadrat,
Synchronization and Linearity, 1992, chapter 3).

[Note: settled] Compare the last ``c`` steps with the ``c`` steps before them. Let ``G`` be the
growth of the job's end over the last ``c`` steps. Consider all times that a later step can still
need. Suppose that none of them grew by more than ``G`` over the earlier or the last ``c`` steps. If
every time that grew by ``G`` over the earlier ``c`` steps also grew by ``G`` over the last, the job
grows by ``G`` every ``c`` steps for ever:

- It cannot grow faster. The largest growth of any time never rises: each new time follows from the
  latest of some earlier times, and these grew by no more (Collatz and Wielandt).
- It cannot grow slower. A time that grew by ``G`` follows from a time that grew by ``G`` over the
  ``c`` steps before. By assumption the latter has grown by ``G`` again since, so what follows from
  it will also grow by ``G`` again.

Parts of the job that nothing holds back may run at a pace of their own, for example a host that
issues ahead of its device.
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
"""Most simulated steps. A job that has not settled by then is shown as it is, marked unsettled."""
LONGEST_CYCLE = 8
"""Longest cycle, in steps, with which times may repeat for a job to count as settled."""
FEWEST_KEPT = 5
"""Fewest steps whose ends are kept, including the last one: enough for two cycles of two steps."""
MOST_BYTES = 2**30
"""Most bytes of kept ends. Beyond it the oldest are dropped, and only shorter cycles are found."""

Ends = dict[tuple[int, int], Times]
"""Ends that later steps need, by class and distance back from the class's next position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady:
    """The steady state that a job settled in."""

    steps: int
    """Number of simulated steps until the job had settled."""
    cycle: int = 1
    """Number of steps after which all times repeat, later by a constant."""
    cycle_ns: int
    """This constant: the duration of a cycle."""
    settled: bool = True

    @property
    def step_ns(self) -> int:
        """Duration of the steady step."""
        return round(self.cycle_ns / self.cycle)


class SteadyWatch:
    """Checks an engine for the steady state whenever all its classes have ended a step."""

    def __init__(self) -> None:
        # Reaches from now back over two of the longest cycles: see [Note: settled].
        self._ends: deque[Ends] = deque(maxlen=2 * LONGEST_CYCLE + 1)
        self._job_end_ns: list[int] = []

    def look(self, engine: Engine, job_end_ns: int) -> Steady | None:
        """Return how the job has settled, or None while it has not.

        Args:
            engine: all its classes are at the end of a step.
            job_end_ns: when the last rank ended that step.
        """
        self._ends.append(engine.ends_asked_for())
        while len(self._ends) > FEWEST_KEPT and _bytes(self._ends) > MOST_BYTES:
            self._ends.popleft()
        self._job_end_ns.append(job_end_ns)
        done = len(self._job_end_ns)
        # The shortest cycle comes first, because its multiples repeat as well.
        for cycle in range(1, (len(self._ends) - 1) // 2 + 1):
            grown_ns = job_end_ns - self._job_end_ns[-1 - cycle]
            if self._repeats(cycle, grown_ns):
                return Steady(steps=done, cycle=cycle, cycle_ns=grown_ns)
        if done < MOST_STEPS:
            return None
        # The job is given up: the mean of the later half of its steps stands for the step.
        half = done // 2
        grown_ns = job_end_ns - self._job_end_ns[half - 1]
        return Steady(steps=done, cycle=done - half, cycle_ns=grown_ns, settled=False)

    def _repeats(self, cycle: int, grown_ns: int) -> bool:
        """Return whether the job repeats with this cycle; see [Note: settled]."""
        now, then, before = (self._ends[-1 - n * cycle] for n in range(3))
        # In the first steps some of the ends that later steps need do not exist yet.
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
    """Run ``engine``, which has run no step yet, until its job has settled or is given up.

    Args:
        engine: see :class:`SteadyWatch`.
        job_end_ns: returns when the last rank ended the most recent step.
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
    """The state of a simulation from which others go on, usually that of a settled job."""

    state: EngineState
    steps: int
    """Number of steps simulated so far."""
    end_ns: int
    """When the job ended the last of these steps."""
    cycle: int = 1
    """Number of steps after which times repeat; see :class:`Steady`."""


def settle(job: JobProgram, durations: DurationSource) -> Start:
    """Simulate until the step has settled.

    If the job does not settle, simulate only until the start of those steps whose mean is shown as
    its step.
    """
    engine = Engine(job, durations, steps=0, on_step_end=(ends := _LastStep()))
    steady = until_settled(engine, lambda: ends.job_end_ns)
    steps, cycle = steady.steps, steady.cycle
    if not steady.settled:
        return replace(simulated(job, durations, steps - cycle), cycle=cycle)
    return Start(state=engine.standing(), steps=steps, end_ns=ends.job_end_ns, cycle=cycle)


def simulated(job: JobProgram, durations: DurationSource, steps: int) -> Start:
    """Simulate ``steps`` steps."""
    engine = Engine(job, durations, steps=0, on_step_end=(ends := _LastStep()))
    for done in range(1, steps + 1):
        engine.extend(done)
        engine.run()
    return Start(state=engine.standing(), steps=steps, end_ns=ends.job_end_ns)


class _LastStep:
    """A step-end callback that keeps the job's end of the last step."""

    def __init__(self) -> None:
        self.job_end_ns = 0
        self._step = 0

    def __call__(self, class_index: int, step: int, end: Times) -> None:
        # A step may end earlier than the step before if nothing in it waits for that step's last
        # work.
        before_ns = self.job_end_ns if step == self._step else 0
        self._step, self.job_end_ns = step, max(before_ns, int(end.max()))


def _bytes(kept: Iterable[Ends]) -> int:
    return sum(times.nbytes for ends in kept for times in ends.values())
