"""PRISM's published experiments (arXiv 2510.15596) on one null-device run.

They show its step as a distribution; the probability of slow steps; which class of kernels or
communications to make steadier (*ablated p95*); one hot node at each pipeline stage; and the
placement of a fleet of nodes of unequal speed. Every figure is what ``forecast``, ``sensitivity``
and ``place`` give with the same options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from prismscale.errors import UsageError
from prismscale.forecast.draws.executor import Executor
from prismscale.forecast.draws.montecarlo import Draws, MonteCarlo, draw_steps
from prismscale.forecast.guarantees import Estimate, quantile_estimates, slowdown_probability
from prismscale.forecast.model import Model, model_of
from prismscale.forecast.modelled.profile_draws import ProfileDraws
from prismscale.forecast.placement.node_placement import HotNode, PlacedTail, PlacementStudy
from prismscale.forecast.placement.nodes import nodes_of_profile
from prismscale.forecast.placement.placed_job import (
    NodeSlots,
    PlacedJob,
    Search,
    keeps_nodes_whole,
    node_slots,
    profile_of,
    ranks_of_a_node,
)
from prismscale.forecast.recording import Recording
from prismscale.forecast.run_spread import RunSpread
from prismscale.forecast.sensitivity import ALL_STEPS, Sensitivity, ablate, classes_of
from prismscale.progress import StageUpdate

QUANTILES = (0.05, 0.5, 0.95)
FEWER, FEWEST_DRAWS = 4, 256
"""How many times fewer draws tell how placements vary, and the smallest number of them."""

Stage = Callable[[str], StageUpdate]
"""Begins a named part of the work and returns the callback for its progress."""


@dataclass(frozen=True, kw_only=True)
class Experiments:
    """What the user asks for."""

    config: MonteCarlo
    slower: tuple[float, ...] = (1.01, 1.02, 1.05, 1.1)
    """Factors of P(step > factor × median)."""
    hot: tuple[float, ...] = (1.1, 1.2, 1.3, 1.4, 1.5)
    search: Search = field(default_factory=Search)
    """How placements are searched."""

    @property
    def fewer(self) -> MonteCarlo:
        """Configuration with fewer draws, for placements, of which there are many."""
        draws = max(self.config.draws // FEWER, min(self.config.draws, FEWEST_DRAWS))
        return replace(self.config, draws=draws)


@dataclass(frozen=True, kw_only=True, slots=True)
class HotStage:
    """The step with one slow node at one stage, with and without other variation."""

    stage: int
    factor: float
    step_ns: float
    slowdown: float
    """Step without variation over that without the slow node, minus 1."""
    p95_ns: float | None
    """p95 with variation. None except for the largest factor."""


@dataclass(frozen=True, kw_only=True)
class PrismStudy:
    """Results of the experiments on one run."""

    world_size: int
    profile: str
    step_ns: int
    """Step time without variation, as ``prismscale run`` shows it."""
    drawn: Draws
    quantiles: dict[float, Estimate]
    slow: dict[float, Estimate]
    """P(step > factor × median), by factor."""
    spread: RunSpread | None
    """Variation between and within runs. None where a single run was drawn."""
    classes: Sensitivity
    """Effect of making kernels and communications steady, by class."""
    hot: tuple[HotStage, ...]
    placement: PlacementStudy
    tails: tuple[PlacedTail, ...]
    notes: tuple[str, ...]

    @property
    def growth(self) -> float:
        """Median step over the step without variation, minus 1."""
        return self.quantiles[0.5].value / self.step_ns - 1

    @property
    def hot_spread(self) -> float | None:
        """p95 with the hottest node at the worst stage over that at the best stage, minus 1.

        None without hot nodes.
        """
        far = [h.p95_ns for h in self.hot if h.p95_ns is not None]
        return max(far) / min(far) - 1 if far else None


def prism_study(
    found: Recording, asked: Experiments, stage: Stage, executor: Executor | None = None
) -> PrismStudy:
    """Run all experiments on one run.

    Raises:
        UsageError: it is not a null-device run that varies by a profile, or its devices are all
            alike.
    """
    slots = node_slots(found.samples, ranks_of_a_node(found))
    model = model_of(found, fused=keeps_nodes_whole(found, slots))
    source = model.source
    if not isinstance(source, ProfileDraws):
        raise UsageError(
            "study prism is for runs on the null device that vary by a profile (--variability "
            "measured); what was recorded, or is held still, has forecast, sensitivity and place"
        )
    subject = _placed(found, model, slots, asked.search.seed)
    config = model.drawn(asked.config)
    drawn = draw_steps(
        model.graph,
        source,
        config,
        base=model.base,
        executor=executor,
        progress=stage("draw"),
    )
    names, freeze = classes_of(source)
    classes = ablate(
        model.graph,
        names,
        freeze,
        config,
        base=model.base,
        unfrozen=drawn,
        executor=executor,
        progress=stage("freeze"),
    )
    placement, hot = subject.by_steps(asked.search, list(asked.hot), stage("search"))
    # With a single run, there are only steps to compare.
    has_runs = drawn.by_run_AT.shape[1] > 1 and len(drawn.by_run_AT) > 1
    steps = drawn.by_run_AT if has_runs else drawn.step_ns_D
    return PrismStudy(
        world_size=found.samples.graph.world_size,
        profile=profile_of(found).name,
        step_ns=model.step_ns,
        drawn=drawn,
        quantiles=quantile_estimates(steps, QUANTILES, seed=config.seed),
        slow={factor: slowdown_probability(steps, factor) for factor in asked.slower},
        spread=RunSpread.of(drawn.by_run_AT) if has_runs else None,
        classes=classes,
        hot=_hot_stages(subject, hot, asked.fewer, stage("hot nodes"), executor),
        placement=placement,
        tails=subject.tails(placement, ALL_STEPS, asked.fewer, executor, stage("placements")),
        notes=model.notes,
    )


def _placed(found: Recording, model: Model, slots: NodeSlots, seed: int) -> PlacedJob:
    """Return the run on as many nodes as it has, which are as unequal as its profile says."""
    count, per_node = len(slots.ranks), len(slots.ranks[0])
    return PlacedJob(
        recording=found,
        model=model,
        slots=slots,
        nodes=nodes_of_profile(profile_of(found), count, per_node, seed=seed),
        own_R=np.ones(found.samples.graph.world_size),
    )


def _hot_stages(
    subject: PlacedJob,
    hot: Sequence[HotNode],
    config: MonteCarlo,
    update: StageUpdate,
    executor: Executor | None,
) -> tuple[HotStage, ...]:
    """Add the p95 with variation for the largest factor.

    It shows how far placement decides the p95.
    """
    hottest = max((h.factor for h in hot), default=0.0)
    varied = [h for h in hot if h.factor == hottest]
    slots = range(len(subject.slots.ranks))
    factors = [[h.factor if s == h.node_slot else 1.0 for s in slots] for h in varied]
    drawn = subject.drawn(factors, config, executor, update)
    p95_ns = {h.node_slot: own.quantile_ns(ALL_STEPS) for h, own in zip(varied, drawn, strict=True)}
    stage_R = subject.recording.samples.stage_R
    return tuple(
        HotStage(
            stage=int(stage_R[subject.slots.ranks[h.node_slot][0]]),
            factor=h.factor,
            step_ns=h.step_ns,
            slowdown=h.slowdown,
            p95_ns=p95_ns.get(h.node_slot) if h.factor == hottest else None,
        )
        for h in hot
    )
