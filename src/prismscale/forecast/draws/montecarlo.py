"""Monte Carlo: many draws of all durations are re-timed and give the distribution of the step time.

Draws are an additional array axis of the engine, cut into chunks that fit a memory budget. A
chunk's random numbers come from the seed and the chunk's number, so results do not depend on how
many workers there are, or where. They do depend on the size of the chunks, and so on the budget.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.source import Duration, DurationSource, FactoredDurations
from prismscale.errors import UsageError
from prismscale.forecast.draws.executor import Executor, Serial
from prismscale.graph.job_graph import JobGraph
from prismscale.progress import StageUpdate
from prismscale.sim.engine import Engine
from prismscale.sim.program import ClassProgram, JobProgram, compile_job
from prismscale.sim.state import Times
from prismscale.sim.steady import Start, settle, simulated

MOST_DRAWS_A_CHUNK = 128
"""Largest number of draws in a chunk. With more, an array of a class leaves the processor's cache
and a draw costs more, not less."""
DRAWN_STEPS = 2
"""Steps that are drawn by default. The first one makes draws enter the second at different times,
as they would in the job."""
SAFETY = 2
"""Factor on the known memory of a draw, for messages in flight and the engine's temporaries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A number of draws that one task computes together."""

    index: int
    draws: int
    seed: int

    def generator(self, *key: int) -> np.random.Generator:
        """Return the random stream of ``key``. It does not depend on the order of calls."""
        sequence = np.random.SeedSequence(self.seed, spawn_key=(self.index, *key))
        return np.random.Generator(np.random.SFC64(sequence))


class DrawSource(Protocol):
    """Source of random durations of a graph. Must be picklable."""

    def chunk(self, chunk: Chunk) -> DurationSource:
        """Return durations with a draw axis of length ``chunk.draws``, given by ``chunk`` alone."""
        ...


class LazyBody(Sequence[Duration]):
    """Durations of a body, drawn when the engine asks: all at once would not fit in memory."""

    @abstractmethod
    def draw(self, node: int) -> Duration:
        """Return the durations of one body node."""

    @overload
    def __getitem__(self, node: int) -> Duration: ...
    @overload
    def __getitem__(self, node: slice) -> Sequence[Duration]: ...
    def __getitem__(self, node: int | slice) -> Duration | Sequence[Duration]:
        if isinstance(node, slice):
            return [self.draw(i) for i in range(*node.indices(len(self)))]
        return self.draw(node)

    def __iter__(self) -> Iterator[Duration]:
        return (self.draw(i) for i in range(len(self)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MonteCarlo:
    """How many draws to make, of how many steps, and in how much memory."""

    draws: int = 1000
    seed: int = 0
    steps: int | None = None
    """Consecutive steps in a draw; the last :attr:`counted` of them count. 1 is enough where a step
    ends at a barrier of all ranks, because the next step then begins as this one did. None: see
    [Note: drawn steps]."""
    counted: int = 1
    """Number of steps at the end of a draw that count. Each of them is one of :attr:`draws`. They
    share what belongs to a run: its devices and its links."""
    memory_bytes: int = 2**30
    """Memory of one worker for times and durations."""

    def __post_init__(self) -> None:
        for name in ("draws", "steps", "counted", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; at least 1 is needed")
        if self.seed < 0:
            raise UsageError(f"seed is {self.seed}; allowed: 0 or more")
        if self.steps is not None and self.steps < self.counted:
            raise UsageError(f"{self.counted} of {self.steps} steps count; draw at least as many")


@dataclass(frozen=True, kw_only=True)
class Base:
    """A run without variation: the one step that every command shows."""

    graph: JobGraph
    plain: DurationSource
    """Durations without :attr:`factor_R`."""
    factor_R: NDArray[np.float64]
    """Factor on each rank's computation: slow ranks."""
    step_ns: int
    steps: int | None
    """Number of simulated steps, the last of which is shown. None: until the job has settled."""

    @property
    def durations(self) -> DurationSource:
        """Durations that :attr:`step_ns` results from."""
        return FactoredDurations(graph=self.graph, durations=self.plain, factor_R=self.factor_R)

    def slowed(self, factor_R: NDArray[np.float64]) -> Base:
        """Return the same job with a further factor on each rank's computation.

        Its step is not known: :attr:`step_ns` is 0.
        """
        return replace(self, factor_R=self.factor_R * factor_R, step_ns=0)


@dataclass(frozen=True, kw_only=True)
class SteadyDraws:
    """Draws without variation: every draw is the same (a :class:`DrawSource`)."""

    base: Base

    def chunk(self, chunk: Chunk) -> DurationSource:
        """Return the run's own durations, for every chunk."""
        return self.base.durations


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What every worker needs: the compiled job, the source of durations, and where draws begin."""

    job: JobProgram
    source: DrawSource
    steps: int
    """Number of steps to draw after those of :attr:`start`."""
    counted: int = 1
    """Number of drawn steps that count, the last ones."""
    start: Start | None = None
    """State from which draws begin. None: time 0, all ranks together."""


def drawing(
    job: JobProgram,
    source: DrawSource,
    *,
    base: Base | None,
    steps: int | None = None,
    counted: int = 1,
) -> Drawing:
    """Plan how draws reach the steps that count.

    [Note: drawn steps] A step depends on how ranks enter it. So draws continue from a state of the
    run without variation. That is the settled job. Where the run simulates a fixed number of steps,
    it is the state after as many steps as give the drawn ones their place in the simulation that
    ``prismscale run`` shows. The first drawn step makes the entry into the second random, and the
    last one counts. Without variation, the counted step is the run's step, to the nanosecond.

    Args:
        base: the run without variation; None: begin at time 0.
        steps: number of steps to draw; None: :data:`DRAWN_STEPS` and one more for each further step
            that counts. A run with fewer steps draws all of its own.
        counted: how many of the drawn steps count, the last ones.
    """
    wanted = steps or DRAWN_STEPS + counted - 1
    if base is None:
        return Drawing(job=job, source=source, steps=wanted, counted=counted)
    if base.steps is None:
        start = settle(job, base.durations)
        # At least a whole cycle: the step is a mean over it.
        drawn = max(wanted, start.cycle + counted - 1)
        return Drawing(job=job, source=source, steps=drawn, counted=counted, start=start)
    drawn = min(wanted, base.steps)
    before = base.steps - drawn
    start_or_none = simulated(job, base.durations, before) if before else None
    return Drawing(job=job, source=source, steps=drawn, counted=counted, start=start_or_none)


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Step times of all draws."""

    step_ns_D: NDArray[np.int64]
    """Step times; the counted steps of one draw are adjacent."""
    config: MonteCarlo

    @property
    def by_run_AT(self) -> NDArray[np.int64]:
        """The same step times, by run (``A``) and counted step of the run (``T``)."""
        return self.step_ns_D.reshape(-1, self.config.counted)

    def quantile_ns(self, q: float) -> float:
        """Return a quantile of the step time."""
        return float(np.quantile(self.step_ns_D, q))


def draw_steps(
    graph: JobGraph,
    source: DrawSource,
    config: MonteCarlo,
    *,
    base: Base | None = None,
    executor: Executor | None = None,
    progress: StageUpdate | None = None,
) -> Draws:
    """Return the step times of ``config.draws`` draws. See [Note: drawn steps].

    Raises:
        UsageError: a single draw does not fit the memory budget.
        StuckError: the graph cannot run to its end.
    """
    (drawn,) = draw_each(graph, [(source, base)], config, executor=executor, progress=progress)
    return drawn


def draw_each(
    graph: JobGraph,
    variants: Sequence[tuple[DrawSource, Base | None]],
    config: MonteCarlo,
    *,
    executor: Executor | None = None,
    progress: StageUpdate | None = None,
) -> list[Draws]:
    """Draw from each of several sources on one graph, each from its own base.

    Every source gets the draws that :func:`draw_steps` gives for it alone. The chunks of all
    sources are the executor's tasks, so there are enough tasks even where one source is a single
    chunk.
    """
    job = compile_job(graph)
    chunks = chunks_of(config, bytes_per_draw(job))
    begun: dict[int, Drawing] = {}
    drawings = []
    for source, base in variants:
        # Known by identity of the base: settling the job takes as long as some draws, and variants
        # share a base.
        if id(base) not in begun:
            begun[id(base)] = drawing(
                job, source, base=base, steps=config.steps, counted=config.counted
            )
        drawings.append(replace(begun[id(base)], source=source))
    tasks = [(which, chunk) for which in range(len(variants)) for chunk in chunks]
    results: list[list[NDArray[np.int64]]] = [[] for _ in variants]
    whole = config.draws * len(variants)
    done = 0
    for (which, _), step_ns_D in zip(
        tasks, (executor or Serial()).map(run_task, tuple(drawings), tasks), strict=True
    ):
        results[which].append(step_ns_D)
        done += len(step_ns_D)
        if progress is not None:
            progress(min(done, whole), whole)
    return [Draws(step_ns_D=np.concatenate(own), config=config) for own in results]


def run_task(shared: Sequence[Drawing], task: tuple[int, Chunk]) -> NDArray[np.int64]:
    """Compute one chunk of one of several drawings."""
    which, chunk = task
    return run_chunk(shared[which], chunk)


def run_chunk(shared: Drawing, chunk: Chunk) -> NDArray[np.int64]:
    """Return the step times of one chunk, draw by draw.

    The time of a counted step is the mean period over the steps of the settled job's cycle, up to
    and including this step.
    """
    start = shared.start
    before = start.steps if start else 0
    # Row 0: the end of the step before the drawn ones.
    ends_TD = np.zeros((shared.steps + 1, chunk.draws), dtype=np.int64)
    ends_TD[0] = start.end_ns if start else 0

    def step_end(class_index: int, step: int, end: Times) -> None:
        row = step - before + 1
        if row >= 0:
            np.maximum(ends_TD[row], end.max(axis=-1), out=ends_TD[row])

    engine = Engine(
        shared.job,
        shared.source.chunk(chunk),
        steps=before + shared.steps,
        on_step_end=step_end,
        start=start.state if start else None,
    )
    engine.run()
    cycle = start.cycle if start else 1
    before_TD = ends_TD[-shared.counted - cycle : -cycle]
    step_ns_TD = np.rint((ends_TD[-shared.counted :] - before_TD) / cycle).astype(np.int64)
    return step_ns_TD.T.ravel()


def chunks_of(config: MonteCarlo, draw_bytes: int) -> list[Chunk]:
    """Cut the draws into chunks that fit the memory budget.

    Raises:
        UsageError: a single draw does not fit.
    """
    if draw_bytes > config.memory_bytes:
        raise UsageError(
            f"one draw needs about {draw_bytes:,} bytes, the budget is {config.memory_bytes:,}; "
            "raise the budget (--memory)"
        )
    runs = -(-config.draws // config.counted)
    size = min(config.memory_bytes // draw_bytes, MOST_DRAWS_A_CHUNK, runs)
    starts = range(0, runs, size)
    return [
        Chunk(index=i, draws=min(size, runs - first), seed=config.seed)
        for i, first in enumerate(starts)
    ]


def bytes_per_draw(job: JobProgram) -> int:
    """Estimate the most memory that one draw holds: end times that a later node still needs."""
    return 8 * SAFETY * sum(_most_alive(p) * p.n_members for p in job.classes)


def _most_alive(program: ClassProgram) -> int:
    alive = most = 0
    first = program.n_prologue
    # The second pass over the body starts with the end times that the first left alive.
    for x in range(first, first + 2 * program.n_body):
        node = program.template(x)
        alive += program.kept[node]
        # Measured before the frees: a node's inputs are held while its own end time is computed.
        most = max(most, alive)
        alive -= sum(x - distance >= first for distance in program.frees[node])
    return max(most, 1)
