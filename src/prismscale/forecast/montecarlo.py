"""Monte Carlo: many draws of all durations, re-timed together, give the law of the step time.

Draws are one more array axis of the engine, cut into chunks that fit a memory budget. A chunk's
random numbers come from the seed and the chunk's number, so results do not depend on how many
workers there are, or where. (They do depend on the chunks' size, and so on the budget.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.source import Duration, DurationSource
from prismscale.errors import UsageError
from prismscale.forecast.executor import Executor, Serial
from prismscale.graph.job_graph import JobGraph
from prismscale.progress import StageUpdate
from prismscale.sim.engine import Engine
from prismscale.sim.program import ClassProgram, JobProgram, compile_job
from prismscale.sim.state import Times

MOST_DRAWS_A_CHUNK = 128
"""Beyond this an array of a class leaves the processor's cache and draws get dearer, not
cheaper."""
SAFETY = 2
"""Times what is known to be held: messages under way, and the engine's temporaries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Some of the draws."""

    index: int
    draws: int
    seed: int

    def generator(self, *key: int) -> np.random.Generator:
        """A stream of random numbers of its own for every ``key``, in whatever order asked."""
        sequence = np.random.SeedSequence(self.seed, spawn_key=(self.index, *key))
        return np.random.Generator(np.random.SFC64(sequence))


class DrawSource(Protocol):
    """Random durations of a graph. Must be picklable."""

    def chunk(self, chunk: Chunk) -> DurationSource:
        """Durations with a draw axis of length ``chunk.draws``, a function of ``chunk`` alone."""
        ...


class LazyBody(Sequence[Duration]):
    """Durations of a body that are drawn when the engine asks: all at once would not fit."""

    @abstractmethod
    def draw(self, node: int) -> Duration:
        """Durations of one body node."""

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
    """How many draws, and at what cost."""

    draws: int = 1000
    seed: int = 0
    steps: int = 2
    """Consecutive steps a draw; the last one counts. 1 is enough where a step ends at a barrier of
    all ranks, for then the next begins as this one did."""
    memory_bytes: int = 2**30
    """Of one worker, for times and durations."""

    def __post_init__(self) -> None:
        for name in ("draws", "steps", "memory_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; at least 1 is needed")


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Step times of all draws."""

    step_ns_D: NDArray[np.int64]
    config: MonteCarlo

    def quantile_ns(self, q: float) -> float:
        """Quantile of the step time."""
        return float(np.quantile(self.step_ns_D, q))


def draw_steps(
    graph: JobGraph,
    source: DrawSource,
    config: MonteCarlo,
    *,
    executor: Executor | None = None,
    progress: StageUpdate | None = None,
) -> Draws:
    """Step times of ``config.draws`` draws.

    Raises:
        UsageError: a single draw does not fit the memory budget.
        StuckError: the graph cannot run to its end.
    """
    job = compile_job(graph)
    chunks = chunks_of(config, bytes_per_draw(job))
    results: list[NDArray[np.int64]] = []
    done = 0
    shared = (job, source, config.steps)
    for step_ns_D in (executor or Serial()).map(run_chunk, shared, chunks):
        results.append(step_ns_D)
        done += len(step_ns_D)
        if progress is not None:
            progress(done, config.draws)
    return Draws(step_ns_D=np.concatenate(results), config=config)


def run_chunk(shared: tuple[JobProgram, DrawSource, int], chunk: Chunk) -> NDArray[np.int64]:
    """Step times ``[D]`` of one chunk: the period of the last simulated step."""
    job, source, steps = shared
    ends_TD = np.zeros((steps, chunk.draws), dtype=np.int64)

    def step_end(class_index: int, step: int, end: Times) -> None:
        latest = end.max(axis=-1)
        np.maximum(ends_TD[step], latest, out=ends_TD[step])

    Engine(job, source.chunk(chunk), steps=steps, on_step_end=step_end).run()
    return np.diff(ends_TD, axis=0, prepend=0)[-1]


def chunks_of(config: MonteCarlo, draw_bytes: int) -> list[Chunk]:
    """Cut the draws so that each chunk fits the budget.

    Raises:
        UsageError: one draw alone does not.
    """
    if draw_bytes > config.memory_bytes:
        raise UsageError(
            f"one draw needs about {draw_bytes:,} bytes, the budget is {config.memory_bytes:,}; "
            "raise the budget (--memory)"
        )
    size = min(config.memory_bytes // draw_bytes, MOST_DRAWS_A_CHUNK, config.draws)
    starts = range(0, config.draws, size)
    return [
        Chunk(index=i, draws=min(size, config.draws - first), seed=config.seed)
        for i, first in enumerate(starts)
    ]


def bytes_per_draw(job: JobProgram) -> int:
    """Estimate of what one draw holds at most: end times that somebody still needs."""
    return 8 * SAFETY * sum(_most_alive(p) * p.n_members for p in job.classes)


def _most_alive(program: ClassProgram) -> int:
    alive = most = 0
    first = program.n_prologue
    # The second pass over the body starts with what the first left alive.
    for x in range(first, first + 2 * program.n_body):
        node = program.template(x)
        alive += program.kept[node]
        most = max(most, alive)
        alive -= sum(x - distance >= first for distance in program.frees[node])
    return max(most, 1)
