"""The step of many placements at once, as ``prismscale run --slow`` shows it.

Placements are an additional axis of the engine, as draws are: one pass over the job answers for all
of them. Nothing else varies.

Array axes: ``P`` placements, ``S`` node slots, ``R`` ranks, ``M`` members of a class.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.source import Duration, scaled
from prismscale.errors import UsageError
from prismscale.forecast.draws.lockstep import FusedGraph
from prismscale.forecast.draws.montecarlo import Base, LazyBody, bytes_per_draw
from prismscale.forecast.placement.node_placement import NodePlacement
from prismscale.forecast.placement.nodes import ClusterNode
from prismscale.graph.job_graph import RankClass
from prismscale.sim.engine import Engine
from prismscale.sim.program import compile_job
from prismscale.sim.state import Times
from prismscale.sim.steady import settle

Floats = NDArray[np.float64]

MOST_AT_ONCE = 32
"""Placements of one pass: with more, arrays leave the processor's cache."""
MEMORY_BYTES = 2**30
SAME_PACE = 1e-6
"""Relative change from one step to the next below which a placement has settled."""
MOST_STEPS = 24


class PlacedSteps:
    """Step times, without variation, of a job whose nodes are placed."""

    def __init__(
        self,
        base: Base,
        fused: FusedGraph | None,
        node_slots: Sequence[Sequence[int]],
        nodes: Sequence[ClusterNode],
    ) -> None:
        """
        Args:
            base: the job without variation.
            fused: how ranks of the whole job became those of ``base``; None: they are the same.
            node_slots: ranks of the whole job, by node slot.
            nodes: at least one for each node slot; more are spare.

        Raises:
            UsageError: there are fewer nodes than node slots, or slots separate ranks that are
                drawn as one.
        """
        if len(nodes) < len(node_slots):
            raise UsageError(
                f"{len(nodes)} nodes for {len(node_slots)} node_slots; list at least as many"
            )
        self._base, self._job = base, compile_job(base.graph)
        self.node_slots = tuple(tuple(slot) for slot in node_slots)
        self._slot_R = _slots_of_ranks(fused, self.node_slots)
        self._factor_N = np.array([n.factor for n in nodes])
        self._start = settle(self._job, base.durations)
        self._known: dict[tuple[float, ...], float] = {}
        fits = MEMORY_BYTES // max(bytes_per_draw(self._job), 1)
        self.batch = int(max(1, min(MOST_AT_ONCE, fits)))

    @property
    def tried(self) -> int:
        """Number of different placements that were evaluated."""
        return len(self._known)

    def many(self, placements: Sequence[Sequence[int]]) -> list[NodePlacement]:
        """Evaluate placements, each given by the node on each slot."""
        factors = [self._factor_N[list(node_S)] for node_S in placements]
        steps_ns = self.with_factors(factors)
        pairs = zip(placements, steps_ns, strict=True)
        return [NodePlacement(node_S=tuple(node_S), step_ns=ns) for node_S, ns in pairs]

    def with_factors(self, factor_PS: Sequence[Floats]) -> list[float]:
        """Return step times in ns, one for each list of node slots' factors."""
        keys = [tuple(factor_S.tolist()) for factor_S in factor_PS]
        left = [key for key in dict.fromkeys(keys) if key not in self._known]
        for first in range(0, len(left), self.batch):
            chosen = left[first : first + self.batch]
            self._known.update(zip(chosen, self._steps_ns(np.array(chosen)), strict=True))
        return [self._known[key] for key in keys]

    def _steps_ns(self, factor_PS: Floats) -> list[float]:
        """Simulate from the settled job without slow nodes until every placement has settled."""
        durations = _PlacedDurations(self._base, factor_PS[:, self._slot_R])
        before, cycle = self._start.steps, self._start.cycle
        ends: list[NDArray[np.int64]] = []

        def step_end(class_index: int, step: int, end: Times) -> None:
            while len(ends) <= step - before:
                ends.append(np.zeros(len(factor_PS), dtype=np.int64))
            if step >= before:
                np.maximum(ends[step - before], end.max(axis=-1), out=ends[step - before])

        engine = Engine(
            self._job, durations, steps=before, on_step_end=step_end, start=self._start.state
        )
        step_P = np.zeros(len(factor_PS))
        # A job that has not settled has a cycle that is longer than that.
        for done in range(1, max(MOST_STEPS, 2 * cycle + 1) + 1):
            engine.extend(before + done)
            engine.run()
            if done <= 2 * cycle:
                continue
            last_P = (ends[done - 1] - ends[done - 1 - cycle]) / cycle
            is_same = np.abs(last_P - step_P) <= SAME_PACE * last_P
            step_P = last_P
            if is_same.all():
                break
        return [float(ns) for ns in step_P]


def _slots_of_ranks(
    fused: FusedGraph | None, node_slots: Sequence[Sequence[int]]
) -> NDArray[np.int64]:
    """Return the slot of every rank that is drawn."""
    ranks = sorted(r for slot in node_slots for r in slot)
    if ranks != list(range(len(ranks))):
        raise UsageError("node_slots must hold every rank of the job once")
    slot_R = np.empty(len(ranks), dtype=np.int64)
    for s, slot in enumerate(node_slots):
        slot_R[list(slot)] = s
    if fused is None:
        return slot_R
    found = np.empty(fused.graph.world_size, dtype=np.int64)
    for own, small, large in zip(
        fused.classes, fused.graph.classes, fused.origin.classes, strict=True
    ):
        slot_KF = slot_R[large.members_M[own.members_KF]]
        if (slot_KF != slot_KF[0]).any():
            raise UsageError(
                "a node holds part of the ranks that are drawn as one: ranks of one set go together"
            )
        found[small.members_M] = slot_KF[0]
    return found


class _PlacedDurations:
    """Durations of the job with the factors of each placement."""

    def __init__(self, base: Base, factor_PR: Floats) -> None:
        self._base, self._factor_PR = base, factor_PR * base.factor_R

    def prologue(self, class_index: int) -> Sequence[Duration]:
        return ()

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        rank_class = self._base.graph.classes[class_index]
        factor_PM = self._factor_PR[:, rank_class.members_M]
        return _PlacedBody(self._base.plain.body(class_index, step), rank_class, factor_PM)


class _PlacedBody(LazyBody):
    def __init__(self, plain: Sequence[Duration], rank_class: RankClass, factor_PM: Floats) -> None:
        self._plain, self._factor_PM = plain, factor_PM
        self._computes_B = rank_class.trace.computes_B.tolist()
        self._known: dict[int, Duration] = {}

    def __len__(self) -> int:
        return len(self._plain)

    def draw(self, node: int) -> Duration:
        duration = self._plain[node]
        if not self._computes_B[node]:
            return duration
        if np.ndim(duration):
            return scaled(duration, self._factor_PM)
        # Many nodes share few different durations.
        if duration not in self._known:
            self._known[duration] = scaled(duration, self._factor_PM)
        return self._known[duration]
