"""Draws recombined from recorded steps: nothing is fitted, and related durations stay together.

Every duration of a draw was recorded on the same rank (worker identity). The recorded step that it
comes from is chosen

- for communication, once per draw: the draw's *base step*. The congestion of one moment stays
  whole.
- for the computation of a microbatch, once for all stages of its replica, forward and backward:
  long sequences are long on every stage. A few neighbouring microbatches share the choice, because
  long sequences come in runs (block bootstrap: Künsch, Annals of Statistics 17(3), 1989).
- for other computation, once per replica.

Only steps in the regime of the base step are chosen. Where several steps are simulated, a regime
lasts as long as it does in the data. Each of these rules can be switched off, to show what it is
worth.

Axes: ``D`` draws, ``T`` recorded steps, ``M`` members, ``G`` groups, ``R`` ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismscale.durations.samples import NO_MICROBATCH, StepSamples
from prismscale.durations.source import Duration, DurationSource, scaled
from prismscale.errors import UsageError
from prismscale.forecast.distributions.duration_distribution import DurationDistribution
from prismscale.forecast.distributions.regime import Regimes, fit_regimes
from prismscale.forecast.draws.montecarlo import Chunk, LazyBody
from prismscale.graph.node import NodeKind

Rows = NDArray[np.int64]

BASE_STREAM, REPLICA_STREAM, NODE_STREAM = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class JointGroup:
    """Which durations are drawn together.

    Forecasts use the defaults, or set :attr:`job`. All other values are for comparison.
    """

    microbatch: bool = True
    """A microbatch's computation on all stages comes from one recorded step. Off: each node is
    drawn alone."""
    neighbours: bool = True
    """A block of n^(1/3) neighbouring microbatches (of n) comes from one recorded step. At this
    length a block bootstrap's bias and variance balance (Hall, Horowitz and Jing, Biometrika 82(3),
    1995). Off: each microbatch is drawn alone."""
    collective: bool = True
    """A communication is drawn once for all its members. Off: it is drawn once for each member, and
    the slowest counts."""
    job: bool = False
    """All computation of all ranks comes from one recorded step, too. This is for jobs in which a
    few captured ranks stand for all: how late one rank is while another is not, is unknown, and
    ``prismscale run`` replays the same step on all of them. It overrides the three fields above."""
    regime: bool = True
    """All communication of a draw comes from one recorded step. Everything else comes from steps of
    its regime. Off: each communication is drawn alone, from any step."""


@dataclass(frozen=True, kw_only=True)
class ReplayDraws:
    """Random durations from recorded steps (a :class:`DrawSource`)."""

    samples: StepSamples
    together: JointGroup = JointGroup()
    regime_T: NDArray[np.int64] | None = None
    """Regime of each recorded step. None: all steps have the same regime."""
    regimes: Regimes | None = None
    """Transitions between regimes from one simulated step to the next. None: the steps' regimes are
    independent."""
    factor_R: NDArray[np.float64] | None = None
    """Further factor on each rank's computation: another placement, or a hot node."""
    frozen: frozenset[tuple[int, int]] = frozenset()
    """(class, body node) pairs whose variation is switched off. Communication is held at its median
    over all steps, computation at its median in the base step's regime, because a regime is not one
    node's alone."""

    modelled: frozenset[tuple[int, int]] = frozenset()
    """(class, body node) pairs of communication with a modelled duration, equal in all steps."""
    modelled_factor: DurationDistribution | None = None
    """Factor on modelled durations, drawn once for each group. None: no factor."""
    once_G: tuple[NDArray[np.int64], ...] | None = None
    """For each family, the index of the :attr:`modelled_factor` draw that each of its groups takes.
    Groups that run in parallel through one cluster node find the network in the same state. None:
    every group has its own draw."""

    def __post_init__(self) -> None:
        if self.regime_T is not None and len(self.regime_T) != self.samples.n_steps:
            raise UsageError(
                f"{len(self.regime_T)} regimes for {self.samples.n_steps} recorded steps"
            )

    def chunk(self, chunk: Chunk) -> DurationSource:
        """Return the durations of one chunk. See :class:`DrawSource`."""
        return _ReplayChunk(self, chunk)


def regimes_of(samples: StepSamples, *, seed: int = 0) -> NDArray[np.int64]:
    """Return the regime of each recorded step. See :func:`fit_step_regimes`."""
    return fit_step_regimes(samples, seed=seed).state_S


def fit_step_regimes(samples: StepSamples, *, seed: int = 0) -> Regimes:
    """Fit regimes to the recorded steps by their total communication time.

    Steps whose ids follow each other count as consecutive.
    """
    total_T = np.zeros(samples.n_steps)
    for rank_class, own in zip(samples.graph.classes, samples.classes, strict=True):
        for b in range(rank_class.trace.n_body):
            if rank_class.trace.kind_N[rank_class.trace.n_prologue + b] != NodeKind.COMPUTE:
                total_T += own.body_ns[b].mean(axis=1)
    breaks = np.flatnonzero(np.diff(np.asarray(samples.step_ids)) != 1) + 1
    # On logarithms, a step of three times the usual time is as far from it as one of a third.
    return fit_regimes(np.split(np.log(np.maximum(total_T, 1.0)), breaks), seed=seed)


class _ReplayChunk:
    """Chooses the recorded step that each duration comes from, for one chunk."""

    def __init__(self, source: ReplayDraws, chunk: Chunk) -> None:
        self.source, self.chunk = source, chunk
        samples = source.samples
        regime_T = source.regime_T
        if regime_T is None or not source.together.regime:
            regime_T = np.zeros(samples.n_steps, dtype=np.int64)
        self._regime_T = regime_T
        # ``_order`` sorts steps by regime: those of a regime begin at ``_first``, ``_count`` of
        # them.
        self._order = np.argsort(regime_T, kind="stable")
        states = source.regimes.n_states if source.regimes is not None else 0
        self._count = np.bincount(regime_T, minlength=states)
        self._first = np.cumsum(self._count) - self._count
        self._bases: dict[int, Rows] = {}
        self._replica_rows: dict[tuple[int, int], Rows] = {}
        microbatches = 1 + max(int(c.microbatch_B.max(initial=-1)) for c in samples.classes)
        self._block = round(microbatches ** (1 / 3)) if source.together.neighbours else 1
        self._replicas, replica_R = np.unique(samples.replica_R, return_inverse=True)
        self.replica_M = [replica_R[c.members_M] for c in samples.graph.classes]

    def prologue(self, class_index: int) -> Sequence[Duration]:
        return self.source.samples.classes[class_index].prologue_ns

    def body(self, class_index: int, step: int) -> Sequence[Duration]:
        return _ReplayBody(self, class_index, step)

    def base_D(self, step: int) -> Rows:
        """Return the base step of every draw."""
        if step not in self._bases:
            rng = self.chunk.generator(BASE_STREAM, step)
            regimes = self.source.regimes
            if step == 0 or regimes is None or not self.source.together.regime:
                n = self.source.samples.n_steps
                self._bases[step] = rng.integers(0, n, self.chunk.draws)
            else:
                before_D = self._regime_T[self.base_D(step - 1)]
                next_D = regimes.follow(rng, before_D)
                # A state that is not the most probable one of any recorded step has no step to
                # draw.
                next_D = np.where(self._count[next_D] > 0, next_D, before_D)
                self._bases[step] = self._one_of(next_D[:, None], rng)[:, 0]
        return self._bases[step]

    def alike(self, step: int, rng: np.random.Generator, width: int) -> Rows:
        """Draw recorded steps ``[D, width]`` of the base step's regime."""
        regime_D = self._regime_T[self.base_D(step)][:, None]
        return self._one_of(np.broadcast_to(regime_D, (self.chunk.draws, width)), rng)

    def _one_of(self, regime_DX: Rows, rng: np.random.Generator) -> Rows:
        """Draw one recorded step for each given regime."""
        pick = (rng.random(regime_DX.shape) * self._count[regime_DX]).astype(np.int64)
        return self._order[self._first[regime_DX] + pick]

    def still(self, ns_TX: NDArray[np.int64], *, by_regime: bool) -> NDArray[np.int64]:
        """Return the same durations without variation, or without variation within a regime."""
        out = np.empty_like(ns_TX)
        regime_T = self._regime_T if by_regime else np.zeros_like(self._regime_T)
        for regime in np.unique(regime_T):
            rows = regime_T == regime
            out[rows] = np.median(ns_TX[rows], axis=0)
        return out

    def of_replicas(self, step: int, microbatch: int) -> Rows:
        """Return the steps ``[D, replica]`` of one microbatch, cached until the step is over."""
        block = microbatch // max(self._block, 1) if microbatch != NO_MICROBATCH else NO_MICROBATCH
        key = (step, block)
        if key not in self._replica_rows:
            # A dropped entry can be drawn again with the same result: its random stream depends on
            # the key alone.
            stale = [k for k in self._replica_rows if k[0] < step - 1]
            for k in stale:
                del self._replica_rows[k]
            # Parts of a stream's key must not be negative, but NO_MICROBATCH is.
            rng = self.chunk.generator(REPLICA_STREAM, step, block - NO_MICROBATCH)
            self._replica_rows[key] = self.alike(step, rng, len(self._replicas))
        return self._replica_rows[key]


class _ReplayBody(LazyBody):
    def __init__(self, parent: _ReplayChunk, class_index: int, step: int) -> None:
        self._parent, self._class_index, self._step = parent, class_index, step
        samples = parent.source.samples
        self._own = samples.classes[class_index]
        self._rank_class = samples.graph.classes[class_index]
        factor = parent.source.factor_R
        self._factor_M = None if factor is None else factor[self._rank_class.members_M]

    def __len__(self) -> int:
        return len(self._own.body_ns)

    def draw(self, node: int) -> Duration:
        source = self._parent.source
        ns_TX = self._own.body_ns[node]
        trace = self._rank_class.trace
        is_compute = bool(trace.kind_N[trace.n_prologue + node] == NodeKind.COMPUTE)
        if (self._class_index, node) in source.frozen:
            ns_TX = self._parent.still(ns_TX, by_regime=is_compute)
        if is_compute:
            return self._computation(node, ns_TX)
        drawn = self._communication(node, ns_TX)
        key = (self._class_index, node)
        if source.modelled_factor is None or key not in source.modelled or key in source.frozen:
            return drawn
        return np.rint(drawn * self._modelled_factor(node)).astype(np.int64)

    def _modelled_factor(self, node: int) -> NDArray[np.float64]:
        """Return the factor ``[D, G]``, or ``[D, 1]`` where one draw serves all groups."""
        source = self._parent.source
        distribution, draws = source.modelled_factor, self._parent.chunk.draws
        trace = self._rank_class.trace
        family = self._rank_class.slots[int(trace.group_index_N[trace.n_prologue + node])].family
        if distribution is None:
            return np.ones((draws, 1))
        if source.once_G is None:
            n_groups = source.samples.graph.families[family].n_groups
            return distribution.sample(self._stream(node), (draws, n_groups))
        once_G = source.once_G[family]
        factor = distribution.sample(self._stream(node), (draws, int(once_G.max()) + 1))
        return factor if factor.shape[1] == 1 else factor[:, once_G]

    def _computation(self, node: int, ns_TX: NDArray[np.int64]) -> Duration:
        parent = self._parent
        if parent.source.together.job:
            drawn = self._of_one_step(ns_TX)
            drawn = drawn if drawn.shape[-1] == 1 else drawn[:, self._own.column_M]
            return drawn if self._factor_M is None else scaled(drawn, self._factor_M)
        if parent.source.together.microbatch:
            microbatch = int(self._own.microbatch_B[node])
            rows = parent.of_replicas(self._step, microbatch)[
                :, parent.replica_M[self._class_index]
            ]
        else:
            rows = parent.alike(self._step, self._stream(node), self._rank_class.size)
        columns = self._own.column_M if ns_TX.shape[1] > 1 else np.zeros(1, dtype=np.int64)
        drawn = ns_TX[rows, columns]
        return drawn if self._factor_M is None else scaled(drawn, self._factor_M)

    def _of_one_step(self, ns_TX: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return durations ``[D, X]`` of the base step, or ``[1, X]`` where all steps are equal."""
        if len(ns_TX) == 1 or (ns_TX == ns_TX[0]).all():
            return ns_TX[:1]
        return ns_TX[self._parent.base_D(self._step)]

    def _communication(self, node: int, ns_TG: NDArray[np.int64]) -> Duration:
        parent, together = self._parent, self._parent.source.together
        if together.job:
            return self._of_one_step(ns_TG)
        groups = np.arange(ns_TG.shape[1])
        if not together.collective:
            rng = self._stream(node)
            draws = [
                ns_TG[parent.alike(self._step, rng, len(groups)), groups]
                for _ in range(self._group_size(node))
            ]
            return np.maximum.reduce(draws)
        if together.regime:
            return ns_TG[parent.base_D(self._step)]
        return ns_TG[parent.alike(self._step, self._stream(node), len(groups)), groups]

    def _group_size(self, node: int) -> int:
        trace = self._rank_class.trace
        i = trace.n_prologue + node
        if trace.kind_N[i] != NodeKind.COLLECTIVE:
            return 2
        return len(trace.groups[int(trace.group_index_N[i])].ranks)

    def _stream(self, node: int) -> np.random.Generator:
        return self._parent.chunk.generator(NODE_STREAM, self._class_index, self._step, node)
