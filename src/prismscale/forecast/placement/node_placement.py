"""Placement: which node of unequal speed hosts which part of the job.

A *node slot* is a set of ranks that one node hosts (a tensor-parallel group, or several); a
placement gives every node slot a node. A node's factor multiplies all computation of its ranks.
Placements are compared by a quantile of the step time on the engine, all on the same draws, or by
the step without variation (:mod:`.placed_steps`).

Exhaustive search goes through the placements that differ. Whole replicas of the pipeline are
interchangeable where they draw from the same pools, and so are nodes of equal speed. Where these
are too many, simulated annealing swaps two nodes at a time (Kirkpatrick et al., Science 220, 1983),
in as many chains as are evaluated at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import UsageError
from prismscale.forecast.draws.montecarlo import Base, Chunk, DrawSource, drawing, run_chunk
from prismscale.forecast.placement.nodes import ClusterNode
from prismscale.graph.job_graph import JobGraph
from prismscale.progress import StageUpdate
from prismscale.sim.program import compile_job

Floats = NDArray[np.float64]

MOST_EXHAUSTIVE = 2_000
"""Number of placements up to which all are tried. Larger numbers are searched."""
MOST_FORCED = 200_000
"""Largest number of placements that are all tried where the user asks for it."""
COOLING = 0.97
FIRST_TEMPERATURE = 0.01
"""At the start, a placement that is 1 % worse is accepted with probability 1/e."""


@dataclass(frozen=True, kw_only=True)
class NodePlacement:
    """The node on each node slot, and the job's step time then."""

    node_S: tuple[int, ...]
    """Index of the node on each node slot."""
    step_ns: float
    """Step time that is minimised: a quantile, or the step without variation."""


@dataclass(frozen=True, kw_only=True)
class PlacementStudy:
    """Result of a search."""

    nodes: tuple[ClusterNode, ...]
    node_slots: tuple[tuple[int, ...], ...]
    given: NodePlacement
    best: NodePlacement
    worst: NodePlacement
    """Worst placement of all that were tried."""
    tried: int
    exhaustive: bool

    @property
    def gain(self) -> float:
        """How many times faster the best placement is than the given order."""
        return self.given.step_ns / self.best.step_ns

    @property
    def spread(self) -> float:
        """Step of the worst placement found over that of the best, minus 1."""
        return self.worst.step_ns / self.best.step_ns - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedTail:
    """How the step varies with one placement."""

    name: str
    step_ns: float
    """Step time with no other variation than the speed of its nodes."""
    p50_ns: float
    far_ns: float
    """The quantile that was asked for."""


class PlacementCosts(Protocol):
    """Evaluates the step time of placements."""

    batch: int
    """Number of placements that are best evaluated at once."""
    node_slots: tuple[tuple[int, ...], ...]

    @property
    def tried(self) -> int:
        """Number of different placements that were evaluated."""
        ...

    def many(self, placements: Sequence[Sequence[int]]) -> list[NodePlacement]:
        """Evaluate placements, each given by the node on each slot."""
        ...


class Evaluator:
    """Evaluates placements by a quantile of the step time, all on the same draws."""

    def __init__(
        self,
        graph: JobGraph,
        source_for: Callable[[Floats], tuple[DrawSource, Base | None]],
        node_slots: Sequence[Sequence[int]],
        nodes: Sequence[ClusterNode],
        *,
        draws: int = 64,
        seed: int = 0,
        quantile: float = 0.95,
        steps: int | None = 1,
    ) -> None:
        """
        Args:
            source_for: returns durations, and the base that draws continue from, given the factor
                of every rank.
            node_slots: ranks of each node slot.
            nodes: at least one for each node slot; more are spare.

        Raises:
            UsageError: there are fewer nodes than node slots, or node slots do not hold every rank
                once.
        """
        ranks = sorted(r for node_slot in node_slots for r in node_slot)
        if ranks != list(range(graph.world_size)):
            raise UsageError("node_slots must hold every rank of the job once")
        if len(nodes) < len(node_slots):
            raise UsageError(
                f"{len(nodes)} nodes for {len(node_slots)} node_slots; list at least as many"
            )
        self._job = compile_job(graph)
        self._source_for = source_for
        self.node_slots = tuple(tuple(node_slot) for node_slot in node_slots)
        self._slot_R = np.empty(graph.world_size, dtype=np.int64)
        for s, node_slot in enumerate(node_slots):
            self._slot_R[list(node_slot)] = s
        self._factor_N = np.array([n.factor for n in nodes])
        self._chunk = Chunk(index=0, draws=draws, seed=seed)
        self._steps, self._quantile = steps, quantile
        self.batch = 1
        self._known: dict[tuple[float, ...], float] = {}

    def __call__(self, node_S: Sequence[int]) -> NodePlacement:
        """Evaluate a placement. Placements of equal factors are computed once."""
        step_ns = self.with_factors(self._factor_N[list(node_S)])
        return NodePlacement(node_S=tuple(node_S), step_ns=step_ns)

    def many(self, placements: Sequence[Sequence[int]]) -> list[NodePlacement]:
        """Evaluate placements."""
        return [self(node_S) for node_S in placements]

    def with_factors(self, factor_S: Floats) -> float:
        """Return the quantile of the step time in ns, given the factor of every node slot."""
        key = tuple(factor_S.tolist())
        if key not in self._known:
            source, base = self._source_for(factor_S[self._slot_R])
            shared = drawing(self._job, source, base=base, steps=self._steps)
            drawn = run_chunk(shared, self._chunk)
            self._known[key] = float(np.quantile(drawn, self._quantile))
        return self._known[key]

    @property
    def tried(self) -> int:
        """Number of different placements that were evaluated."""
        return len(self._known)


def place(
    costs: PlacementCosts,
    nodes: Sequence[ClusterNode],
    replica_S: Sequence[int],
    *,
    seed: int = 0,
    rounds: int = 400,
    exhaustive: bool | None = None,
    progress: StageUpdate = lambda done, total: None,
) -> PlacementStudy:
    """Find a good placement.

    Args:
        costs: evaluates placements.
        nodes: in the given order: at the beginning node ``i`` sits on node slot ``i``.
        replica_S: replica of each node slot. All replicas have the same number of node slots, in
            the order of stages.
        rounds: number of evaluations of the search.
        exhaustive: True or False forces the choice; None tries all placements if they are few.
        progress: called with the number of placements tried, and of those to try.

    Raises:
        UsageError: exhaustive search was asked for, and there are too many placements; or replicas
            differ in size.
    """
    (given,) = costs.many([range(len(replica_S))])
    limit = MOST_EXHAUSTIVE if exhaustive is None else MOST_FORCED
    count = 0 if exhaustive is False else count_placements(nodes, replica_S, limit)
    every = 0 < count <= limit
    if exhaustive and not every:
        raise UsageError(f"more than {limit:,} different placements are too many to try all")
    if every:
        looked_at = _all_of(costs, list(different_placements(nodes, replica_S)))
        seen, total = [given], count
    else:
        starts = costs.many(_starts(nodes, replica_S))
        rng = np.random.default_rng(seed)
        seen, total = [given, *starts], rounds
        looked_at = _anneal(costs, list(seen), nodes, rounds, rng)
    for done, placed in enumerate(looked_at, start=1):
        seen.append(placed)
        progress(min(done, total), total)
    return PlacementStudy(
        nodes=tuple(nodes),
        node_slots=costs.node_slots,
        given=given,
        best=min(seen, key=lambda p: p.step_ns),
        worst=max(seen, key=lambda p: p.step_ns),
        tried=costs.tried,
        exhaustive=every,
    )


def count_placements(nodes: Sequence[ClusterNode], replica_S: Sequence[int], limit: int) -> int:
    """Return how many placements :func:`different_placements` yields; ``limit`` + 1 if more.

    Raises:
        UsageError: replicas differ in size.
    """
    order, width = _slots_by_replica(replica_S)
    held = Counter(node.factor for node in nodes)
    return sum(1 for _ in islice(_filled(held, len(order), width), limit + 1))


def different_placements(
    nodes: Sequence[ClusterNode], replica_S: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield one of each set of placements with the same distribution of the step time.

    Node slots are filled with factors one by one. Of placements that differ only in the order of
    their replicas, only the one with replicas in ascending order is generated.

    Raises:
        UsageError: replicas differ in size.
    """
    order, width = _slots_by_replica(replica_S)
    holders: dict[float, list[int]] = {}
    for index, node in enumerate(nodes):
        holders.setdefault(node.factor, []).append(index)
    for found in _filled({f: len(held) for f, held in holders.items()}, len(order), width):
        free = {factor: iter(indices) for factor, indices in holders.items()}
        node_of = {node_slot: next(free[f]) for node_slot, f in zip(order, found, strict=True)}
        yield tuple(node_of[s] for s in range(len(order)))


def _slots_by_replica(replica_S: Sequence[int]) -> tuple[list[int], int]:
    """Return the node slots, replica by replica, and how many each replica has."""
    slots_of = [[s for s, r in enumerate(replica_S) if r == own] for own in sorted(set(replica_S))]
    width = len(slots_of[0])
    if any(len(node_slots) != width for node_slots in slots_of):
        raise UsageError("replicas differ in their number of node slots")
    return [s for node_slots in slots_of for s in node_slots], width


def _filled(held: Mapping[float, int], node_slots: int, width: int) -> Iterator[tuple[float, ...]]:
    """Yield factors by node slot: each as often as nodes have it, with replicas in ascending order.

    A replica has ``width`` node slots. There is no recursion, because a job may have thousands of
    node slots.
    """
    factors = sorted(held)
    filled: list[float] = []
    left = dict(held)
    # For each node slot filled so far, the factors that are still to be tried.
    choices = [iter(factors)]
    while choices:
        factor = next(choices[-1], None)
        if factor is None:
            choices.pop()
            if filled:
                left[filled.pop()] += 1
            continue
        if not left[factor]:
            continue
        filled.append(factor)
        left[factor] -= 1
        done, rest = divmod(len(filled), width)
        ascending = rest or done < 2 or filled[-2 * width : -width] <= filled[-width:]
        if ascending and len(filled) < node_slots:
            choices.append(iter(factors))
            continue
        if ascending:
            yield tuple(filled)
        left[filled.pop()] += 1


def _starts(nodes: Sequence[ClusterNode], replica_S: Sequence[int]) -> list[list[int]]:
    """Return orders of nodes to begin with.

    Fast nodes come first or last, replica by replica or stage by stage, so that slow nodes share
    few replicas or few stages.
    """
    n = len(replica_S)
    ascending = np.argsort([node.factor for node in nodes], kind="stable").tolist()[:n]
    seen: Counter[int] = Counter()
    place_S = []
    for replica in replica_S:
        place_S.append(seen[replica])
        seen[replica] += 1
    by_replica = sorted(range(n), key=lambda s: (replica_S[s], place_S[s]))
    by_stage = sorted(range(n), key=lambda s: (place_S[s], replica_S[s]))
    found = []
    for slots in (by_replica, by_stage):
        for order in (ascending, ascending[::-1]):
            node_of = dict(zip(slots, order, strict=True))
            found.append([node_of[s] for s in range(n)])
    return found


def _all_of(costs: PlacementCosts, placements: Sequence[Sequence[int]]) -> Iterator[NodePlacement]:
    for first in range(0, len(placements), costs.batch):
        yield from costs.many(placements[first : first + costs.batch])


def _anneal(
    costs: PlacementCosts,
    starts: Sequence[NodePlacement],
    nodes: Sequence[ClusterNode],
    rounds: int,
    rng: np.random.Generator,
) -> Iterator[NodePlacement]:
    """Yield all placements that the search tries. Chains begin at the starts, the fastest first."""
    n_nodes, n_slots = len(nodes), len(starts[0].node_S)
    factors = [n.factor for n in nodes]
    ranked = sorted(starts, key=lambda p: p.step_ns)
    chains = [ranked[i % len(ranked)] for i in range(costs.batch)]
    # In each order the placed nodes come first, then the spare ones.
    orders = [[*c.node_S, *sorted(set(range(n_nodes)).difference(c.node_S))] for c in chains]
    temperature = FIRST_TEMPERATURE
    for _ in range(-(-rounds // costs.batch)):
        swaps = [(int(rng.integers(n_slots)), int(rng.integers(n_nodes))) for _ in chains]
        moved = [
            i for i, (a, b) in enumerate(swaps) if factors[orders[i][a]] != factors[orders[i][b]]
        ]
        for i in moved:
            _swap(orders[i], swaps[i])
        for i, tried in zip(moved, costs.many([orders[i][:n_slots] for i in moved]), strict=True):
            yield tried
            worse = tried.step_ns / chains[i].step_ns - 1
            if worse <= 0 or rng.random() < math.exp(-worse / temperature):
                chains[i] = tried
            else:
                _swap(orders[i], swaps[i])
        temperature *= COOLING


def _swap(order: list[int], places: tuple[int, int]) -> None:
    a, b = places
    order[a], order[b] = order[b], order[a]


@dataclass(frozen=True, kw_only=True, slots=True)
class HotNode:
    """The step with one slow node at one node slot."""

    node_slot: int
    factor: float
    step_ns: float
    slowdown: float
    """Step time over that without the slow node, minus 1."""


def hot_node_study(
    evaluate_with: Callable[[Sequence[Floats]], Sequence[float]],
    n_node_slots: int,
    factors: Sequence[float],
    *,
    node_slots: Sequence[int] | None = None,
) -> list[HotNode]:
    """Return the step with one slower node, at each node slot, for every factor.

    Args:
        evaluate_with: returns step times in ns, given the factors of every node slot, placement by
            placement.
        node_slots: node slots to make slow; None: all.
    """
    slots = range(n_node_slots) if node_slots is None else node_slots
    asked = [(factor, slot) for factor in factors for slot in slots]
    factor_PS = np.ones((1 + len(asked), n_node_slots))
    for row, (factor, slot) in enumerate(asked, start=1):
        factor_PS[row, slot] = factor
    base, *steps = evaluate_with(list(factor_PS))
    return [
        HotNode(node_slot=slot, factor=factor, step_ns=step, slowdown=step / base - 1)
        for (factor, slot), step in zip(asked, steps, strict=True)
    ]
