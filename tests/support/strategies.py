"""Hypothesis strategies: random legal jobs, and random durations for them.

A job is written as one global script of events on a random mesh, and every pipeline stage runs the
events that concern it. Whatever the script, its order is an order in which all ranks can run, so
the job cannot get stuck; everything else (who waits for what, how far back, across how many steps)
is random.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from prismscale.durations.source import Duration
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import RankTrace
from support.jobs import TableDurations, job_from_traces, mesh_groups

PIPE = 0
"""Mesh axis whose coordinate is the pipeline stage; the other axes are all the same inside."""
SAME_EVERYWHERE = [
    CollectiveOp.ALL_REDUCE,
    CollectiveOp.ALL_GATHER,
    CollectiveOp.REDUCE_SCATTER,
    CollectiveOp.ALL_TO_ALL,
    CollectiveOp.BARRIER,
]


@dataclass(kw_only=True)
class Job:
    """A random job and the truth it was made from."""

    graph: JobGraph
    traces: dict[int, RankTrace]
    groups_of: dict[int, list[tuple[int, ...]]]
    """Every rank's groups by group index."""


@dataclass(kw_only=True)
class _Stage:
    builder: TraceBuilder
    group_indices: dict[str, int]
    body_start: int = 0

    def preds(self, rng: random.Random, reach: int) -> list[int]:
        """Positions before the next node: mostly near, sometimes in an earlier step."""
        here = len(self.builder)
        distances = rng.sample(range(1, reach + 1), k=min(reach, rng.choice([0, 1, 1, 2, 3])))
        return [here - d for d in distances]


Event = Callable[[dict[int, _Stage], random.Random, int], None]


@st.composite
def jobs(draw: st.DrawFn, max_ranks: int = 16) -> Job:
    """A legal job of up to ``max_ranks`` ranks on a mesh of up to three axes."""
    shape = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(
            lambda s: int(np.prod(s)) <= max_ranks
        )
    )
    order = draw(st.permutations(range(len(shape))))
    n_prologue = draw(st.integers(0, 6))
    n_body = draw(st.integers(1, 14))
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    local = draw(st.booleans())
    return random_job(shape, list(order), n_prologue, n_body, rng, local=local)


def random_job(
    shape: list[int],
    order: list[int],
    n_prologue: int,
    n_body: int,
    rng: random.Random,
    *,
    local: bool = False,
) -> Job:
    """A job of ``n_prologue`` and then ``n_body`` script events.

    Args:
        shape: mesh axes; axis 0 is the pipeline.
        order: axes from the outermost (largest rank stride) to the innermost.
        local: captured ranks know their own groups only.
    """
    size = int(np.prod(shape))
    mesh = np.arange(size).reshape([shape[a] for a in order]).transpose(np.argsort(order))
    axes = {f"axis{a}": a for a in rng.sample(range(len(shape)), len(shape))}
    records = mesh_groups(mesh, axes)
    leads = {s: int(np.atleast_1d(mesh[s]).flat[0]) for s in range(shape[PIPE])}
    stages = {}
    for s, rank in leads.items():
        own = [g for g in records if rank in g.ranks]
        builder = TraceBuilder(rank=rank, world_size=size, groups=own)
        stages[s] = _Stage(builder=builder, group_indices={g.name: k for k, g in enumerate(own)})
    _write(stages, shape, n_prologue, rng)
    for stage in stages.values():
        stage.builder.begin_body()
        stage.body_start = len(stage.builder)
    _write(stages, shape, n_body, rng)
    for stage in stages.values():
        stage.builder.add_compute(1, preds=stage.preds(rng, 6), label="last")
    known = dict.fromkeys(stages, None if local else records)
    traces = {leads[s]: stage.builder.build(known_groups=known[s]) for s, stage in stages.items()}
    represented = {int(r): leads[s] for s in leads for r in np.atleast_1d(mesh[s]).flat}
    return Job(
        graph=job_from_traces(traces, represented),
        traces=traces,
        groups_of={r: [g.ranks for g in records if r in g.ranks] for r in range(size)},
    )


def _write(stages: dict[int, _Stage], shape: list[int], count: int, rng: random.Random) -> None:
    reach = max(2, 2 * count)
    for _ in range(count):
        event = rng.choice([_compute, _compute, _collective, _everybody, _messages, _ring])
        event(stages, shape, rng, reach)


def _compute(stages: dict[int, _Stage], shape: list[int], rng: random.Random, reach: int) -> None:
    stage = rng.choice(list(stages.values()))
    stage.builder.add_compute(1, preds=stage.preds(rng, reach), label=rng.choice("abc"))


def _collective(
    stages: dict[int, _Stage], shape: list[int], rng: random.Random, reach: int
) -> None:
    """One stage communicates inside itself."""
    stage = rng.choice(list(stages.values()))
    names = [f"axis{a}" for a in range(len(shape)) if a != PIPE]
    if names:
        _call(stage, rng.choice(names), rng.choice(SAME_EVERYWHERE), rng, reach)


def _everybody(stages: dict[int, _Stage], shape: list[int], rng: random.Random, reach: int) -> None:
    """All stages communicate, over the world or along the pipeline."""
    name, op = rng.choice(["world", f"axis{PIPE}"]), rng.choice(SAME_EVERYWHERE)
    for stage in stages.values():
        _call(stage, name, op, rng, reach)


def _call(stage: _Stage, name: str, op: CollectiveOp, rng: random.Random, reach: int) -> None:
    stage.builder.add_communication(
        op,
        64,
        group_index=stage.group_indices[name],
        preds=stage.preds(rng, reach),
        site="train.py:7",
    )


def _messages(stages: dict[int, _Stage], shape: list[int], rng: random.Random, reach: int) -> None:
    """A batch of sends and receives between stages; all of a stage's start together."""
    if len(stages) < 2:
        return
    batch = [rng.sample(list(stages), 2) for _ in range(rng.choice([1, 1, 2, 3]))]
    preds = {s: stage.preds(rng, reach) for s, stage in stages.items()}
    for source, destination in batch:
        for op, me, peer in [
            (CollectiveOp.SEND, source, destination),
            (CollectiveOp.RECV, destination, source),
        ]:
            stages[me].builder.add_communication(
                op,
                32,
                group_index=stages[me].group_indices[f"axis{PIPE}"],
                peer=peer - me,
                preds=preds[me],
            )


def _ring(stages: dict[int, _Stage], shape: list[int], rng: random.Random, reach: int) -> None:
    """Every member of an axis sends to the next and receives from the one before."""
    axes = [a for a in range(len(shape)) if a != PIPE and shape[a] > 1]
    if not axes:
        return
    stage, axis = rng.choice(list(stages.values())), rng.choice(axes)
    preds = stage.preds(rng, reach)
    group_index, hop = stage.group_indices[f"axis{axis}"], rng.randrange(1, shape[axis])
    for op, peer in [(CollectiveOp.SEND, hop), (CollectiveOp.RECV, -hop)]:
        stage.builder.add_communication(op, 16, group_index=group_index, peer=peer, preds=preds)


@st.composite
def durations(
    draw: st.DrawFn, graph: JobGraph, *, steps: int = 1, draws: int = 1
) -> TableDurations:
    """Durations of every node: scalars, or arrays by draw and by member or group."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    top = draw(st.sampled_from([1, 10, 10**6, 10**12]))
    return random_durations(graph, rng, steps=steps, draws=draws, top=top)


def random_durations(
    graph: JobGraph, rng: np.random.Generator, *, steps: int = 1, draws: int = 1, top: int = 100
) -> TableDurations:
    """Random integers up to ``top`` ns in every shape that the engine takes."""
    prologues: dict[int, list[Duration]] = {}
    bodies: dict[int, list[list[Duration]]] = {}
    for rank_class in graph.classes:
        trace = rank_class.trace
        widths = [_width(graph, rank_class, i) for i in range(trace.n_nodes)]
        before, steady = widths[: trace.n_prologue], widths[trace.n_prologue :]
        prologues[rank_class.index] = [_duration(rng, w, draws, top) for w in before]
        bodies[rank_class.index] = [
            [_duration(rng, w, draws, top) for w in steady] for _ in range(steps)
        ]
    return TableDurations(prologues=prologues, bodies=bodies)


def _width(graph: JobGraph, rank_class: RankClass, i: int) -> int:
    trace = rank_class.trace
    if trace.kind_N[i] == NodeKind.COMPUTE:
        return rank_class.size
    return graph.families[rank_class.slots[int(trace.group_index_N[i])].family].n_groups


def _duration(rng: np.random.Generator, width: int, draws: int, top: int) -> Duration:
    shapes = [(), (1,), (width,), (draws, 1), (draws, width)]
    shape = shapes[int(rng.integers(len(shapes)))]
    value = rng.integers(0, top, size=shape, endpoint=True)
    return int(value) if shape == () else value
