"""Placement: which node of unequal speed hosts which part of the job.

A *node_slot* is a set of ranks that one node hosts (a tensor-parallel group, or several); a
placement gives every node slot a node. A node's factor multiplies all computation of its ranks.
Placements are compared by a quantile of the step time on the engine, all on the same draws.

Exhaustive search goes through placements that differ: replicas of the pipeline are interchangeable
as a whole where they draw from the same pools, and so are nodes of equal speed. Beyond that,
simulated annealing over swaps of two nodes (Kirkpatrick et al., Science 220, 1983).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.errors import UsageError
from prismscale.forecast.draws.montecarlo import Base, Chunk, DrawSource, drawing, run_chunk
from prismscale.forecast.placement.nodes import ClusterNode
from prismscale.graph.job_graph import JobGraph
from prismscale.sim.program import compile_job

Floats = NDArray[np.float64]

MOST_EXHAUSTIVE = 2_000
"""Placements that are tried one by one; more are searched."""
COOLING = 0.97
FIRST_TEMPERATURE = 0.01
"""A placement 1 % worse is accepted once in e times at the start."""


@dataclass(frozen=True, kw_only=True)
class NodePlacement:
    """Nodes by node slot, and what the job's step then takes."""

    node_S: tuple[int, ...]
    """Index of the node on each node slot."""
    step_ns: float
    """The quantile of the step time that is minimised."""


@dataclass(frozen=True, kw_only=True)
class PlacementStudy:
    """The outcome of a search."""

    nodes: tuple[ClusterNode, ...]
    node_slots: tuple[tuple[int, ...], ...]
    given: NodePlacement
    best: NodePlacement
    worst: NodePlacement
    """Of all that were tried."""
    tried: int
    exhaustive: bool

    @property
    def gain(self) -> float:
        """How many times faster the best placement is than the given order."""
        return self.given.step_ns / self.best.step_ns

    @property
    def spread(self) -> float:
        """Worst found over best found, minus 1."""
        return self.worst.step_ns / self.best.step_ns - 1


class Evaluator:
    """Step time of a placement: the same draws for every one."""

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
            source_for: durations, and what draws go on from, given the factor of every rank.
            node_slots: ranks of each node slot.
            nodes: at least one a node slot; spare ones may be more.

        Raises:
            UsageError: fewer nodes than node slots, or node slots that do not hold every rank once.
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
        self._known: dict[tuple[float, ...], float] = {}

    def __call__(self, node_S: Sequence[int]) -> NodePlacement:
        """Evaluate a placement; those of equal factors are computed once."""
        step_ns = self.with_factors(self._factor_N[list(node_S)])
        return NodePlacement(node_S=tuple(node_S), step_ns=step_ns)

    def with_factors(self, factor_S: Floats) -> float:
        """The quantile of the step time in ns, given the factor of every node slot."""
        key = tuple(factor_S.tolist())
        if key not in self._known:
            source, base = self._source_for(factor_S[self._slot_R])
            shared = drawing(self._job, source, base=base, steps=self._steps)
            drawn = run_chunk(shared, self._chunk)
            self._known[key] = float(np.quantile(drawn, self._quantile))
        return self._known[key]

    @property
    def tried(self) -> int:
        """Different placements that were evaluated."""
        return len(self._known)


def place(
    evaluate: Evaluator,
    nodes: Sequence[ClusterNode],
    replica_S: Sequence[int],
    *,
    seed: int = 0,
    rounds: int = 400,
    exhaustive: bool | None = None,
) -> PlacementStudy:
    """Find a good placement.

    Args:
        nodes: in the given order: node ``i`` sits on node slot ``i`` to begin with.
        replica_S: replica of each node slot. Replicas hold equally many node slots, in the order of
        stages. rounds: evaluations of the search. exhaustive: True or False to insist; None tries
        all where they are few.

    Raises:
        UsageError: exhaustive search was asked for, and there are too many placements; or replicas
            of different sizes.
    """
    given = evaluate(range(len(replica_S)))
    every = exhaustive
    count = count_placements(nodes, replica_S)
    if every is None:
        every = count <= MOST_EXHAUSTIVE
    if every:
        if count > 100 * MOST_EXHAUSTIVE:
            raise UsageError(f"{count:,} different placements are too many to try all")
        seen = [given, *(evaluate(p) for p in different_placements(nodes, replica_S))]
    else:
        seen = list(_anneal(evaluate, given, nodes, rounds, np.random.default_rng(seed)))
    return PlacementStudy(
        nodes=tuple(nodes),
        node_slots=evaluate.node_slots,
        given=given,
        best=min(seen, key=lambda p: p.step_ns),
        worst=max(seen, key=lambda p: p.step_ns),
        tried=evaluate.tried,
        exhaustive=every,
    )


def count_placements(nodes: Sequence[ClusterNode], replica_S: Sequence[int]) -> int:
    """About how many placements differ: an upper bound where replicas may come out equal."""
    total = math.factorial(len(nodes)) // math.factorial(len(nodes) - len(replica_S))
    for same in Counter(n.factor for n in nodes).values():
        total //= math.factorial(same)
    return max(1, total // math.factorial(len(set(replica_S)))) if total > 1 else 1


def different_placements(
    nodes: Sequence[ClusterNode], replica_S: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """One of each set of placements that cannot differ in the distribution of their step time.

    Filled node slot by node slot with factors; of replicas that hold the same factors in another
    order only the ascending order is gone through.

    Raises:
        UsageError: replicas of different sizes.
    """
    slots_of = [[s for s, r in enumerate(replica_S) if r == own] for own in sorted(set(replica_S))]
    width = len(slots_of[0])
    if any(len(node_slots) != width for node_slots in slots_of):
        raise UsageError("replicas differ in their number of node_slots")
    order = [s for node_slots in slots_of for s in node_slots]
    holders: dict[float, list[int]] = {}
    for index, node in enumerate(nodes):
        holders.setdefault(node.factor, []).append(index)
    for found in _filled({f: len(held) for f, held in holders.items()}, len(order), width):
        free = {factor: iter(indices) for factor, indices in holders.items()}
        node_of = {node_slot: next(free[f]) for node_slot, f in zip(order, found, strict=True)}
        yield tuple(node_of[s] for s in range(len(order)))


def _filled(held: Mapping[float, int], node_slots: int, width: int) -> Iterator[tuple[float, ...]]:
    """Factors node slot by node slot, each as often as there are nodes of it; replicas of ``width``
    node slots in ascending order. Without recursion: a job may have thousands of node slots."""
    factors = sorted(held)
    filled: list[float] = []
    left = dict(held)
    # What is still to be tried at each node slot so far.
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


def _anneal(
    evaluate: Evaluator,
    given: NodePlacement,
    nodes: Sequence[ClusterNode],
    rounds: int,
    rng: np.random.Generator,
) -> Iterator[NodePlacement]:
    """All placements on the way, from the given one and from the slowest nodes put last or
    first."""
    n_nodes, n_node_slots = len(nodes), len(given.node_S)
    factors = [n.factor for n in nodes]
    ascending = np.argsort(factors, kind="stable").tolist()
    starts = [given, evaluate(ascending[:n_node_slots]), evaluate(ascending[:n_node_slots][::-1])]
    yield from starts
    current = min(starts, key=lambda p: p.step_ns)
    spare = [n for n in range(n_nodes) if n not in current.node_S]
    order = [*current.node_S, *spare]
    temperature = FIRST_TEMPERATURE
    for _ in range(rounds):
        i, j = int(rng.integers(n_node_slots)), int(rng.integers(n_nodes))
        if factors[order[i]] == factors[order[j]]:
            continue
        order[i], order[j] = order[j], order[i]
        tried = evaluate(order[:n_node_slots])
        yield tried
        worse = tried.step_ns / current.step_ns - 1
        if worse <= 0 or rng.random() < math.exp(-worse / temperature):
            current = tried
        else:
            order[i], order[j] = order[j], order[i]
        temperature *= COOLING


@dataclass(frozen=True, kw_only=True, slots=True)
class HotNode:
    """One slow node at one node slot."""

    node_slot: int
    factor: float
    step_ns: float
    slowdown: float
    """Over the job without it, minus 1."""


def hot_node_study(
    evaluate_with: Callable[[Floats], float],
    n_node_slots: int,
    factors: Sequence[float],
    *,
    node_slots: Sequence[int] | None = None,
) -> list[HotNode]:
    """The step with one node slower, at each node slot, for every factor.

    Args:
        evaluate_with: step time in ns, given a factor for every node slot.
        node_slots: which to make slow; None for all.
    """
    base = evaluate_with(np.ones(n_node_slots))
    found = []
    for factor in factors:
        for node_slot in range(n_node_slots) if node_slots is None else node_slots:
            factor_S = np.ones(n_node_slots)
            factor_S[node_slot] = factor
            step = evaluate_with(factor_S)
            found.append(
                HotNode(node_slot=node_slot, factor=factor, step_ns=step, slowdown=step / base - 1)
            )
    return found
