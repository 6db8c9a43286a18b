"""``prismscale place``: which node of unequal speed hosts which part of a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from prismscale.commands.forecast_options import (
    ClusterName,
    CommunicationCv,
    ComputeScale,
    Draws,
    Kernels,
    Method,
    Run,
    Seed,
    Slow,
    Stalls,
    Steps,
    Variability,
    WhatIf,
    changes,
    draws_config,
    factors,
    recording,
)
from prismscale.commands.forecast_results import placement_json, save_section
from prismscale.commands.forecast_tables import (
    print_base,
    print_hot_nodes,
    print_notes,
    print_placed_tails,
    print_placement,
)
from prismscale.cost.variability import VariabilityProfile
from prismscale.durations.samples import StepSamples
from prismscale.durations.slow_ranks import slow_lines
from prismscale.errors import UsageError
from prismscale.files import write_text
from prismscale.forecast.draws.montecarlo import MonteCarlo, draw_steps
from prismscale.forecast.draws.quotient import quotient_of
from prismscale.forecast.model import Model, model_of
from prismscale.forecast.modelled.profile_draws import SPATIAL, ProfileDraws
from prismscale.forecast.placement.node_placement import (
    Evaluator,
    HotNode,
    PlacedTail,
    PlacementStudy,
    hot_node_study,
)
from prismscale.forecast.placement.node_placement import place as find_placement
from prismscale.forecast.placement.nodes import (
    ClusterNode,
    nodes_of_profile,
    nodes_of_recording,
    read_nodes,
    read_sniff_test,
)
from prismscale.forecast.placement.placed_steps import PlacedSteps
from prismscale.forecast.recording import Recording
from prismscale.graph.pipeline import pipeline_places

FROM_POOLS, FROM_PROFILE = "pools", "profile"
TAIL_DRAWS = 256
"""Of a null run's placements that are shown."""


def place(
    run: Run,
    nodes: Annotated[
        str,
        typer.Option(
            help="CSV with columns node and factor (or speed, or seconds of a health check); a log "
            "with Megatron-LM's GPU sniff test; profile: drawn from the variability profile; "
            "pools: the speeds that the recording shows."
        ),
    ],
    ranks_per_node: Annotated[
        int | None,
        typer.Option(help="Ranks that one node hosts.", show_default="the cluster's, else 1"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Placements that the search tries.")] = 400,
    hot: Annotated[
        str, typer.Option(help="One node slower at each stage, for example 1.1,1.5.")
    ] = "",
    quantile: Annotated[float, typer.Option(help="Of the step time, to be made small.")] = 0.95,
    draws: Draws = 64,
    cluster: ClusterName = None,
    compute_scale: ComputeScale = None,
    slow: Slow = None,
    kernels: Kernels = None,
    what_if: WhatIf = None,
    variability: Variability = None,
    communication_cv: CommunicationCv = None,
    stalls: Stalls = None,
    method: Method = "auto",
    steps: Steps = None,
    seed: Seed = 0,
) -> None:
    """Which node of unequal speed should host which stage and rank.

    A null run's placements are compared by the step without other variation, as prismscale run
    --slow shows it; the files placement-best.slow and placement-worst.slow of the run folder are
    for that option.
    """
    if not 0 < quantile < 1:
        raise UsageError(f"--quantile {quantile}: it lies between 0 and 1")
    console = Console(highlight=False)
    asked = changes(cluster, compute_scale, slow, kernels, variability, what_if)
    found = recording(run, asked, communication_cv, stalls)
    slots = _node_slots(found.samples, _per_node(found, ranks_per_node))
    # Where a node of the cluster is several slots, ranks of one set may sit in different ones.
    whole = found.cluster is None or len(slots.ranks[0]) >= found.cluster.devices_per_node
    model = model_of(found, method=method, fused=whole and found.modelled_job is not None)
    listed, own_R = _nodes(nodes, found, slots.ranks, seed)
    subject = _PlacedJob(
        recording=found, model=model, slots=slots, nodes=listed, own_R=own_R, quantile=quantile
    )
    hot_factors = factors(hot, "--hot") if hot else []
    if subject.is_modelled:
        study, slowed = _by_steps(subject, rounds, seed, hot_factors)
        tails = _tails(subject, study, draws_config(max(draws, TAIL_DRAWS), seed, steps, 1.0))
        _write_factors(run, study)
    else:
        study, slowed = _by_draws(subject, rounds, seed, hot_factors, draws, steps)
        tails = ()
    print_base(console, model.step_ns)
    print_placement(console, study, found.samples, None if subject.is_modelled else quantile)
    print_placed_tails(console, tails, quantile)
    if slowed:
        print_hot_nodes(console, slowed, [slots.ranks[s][0] for s in slots.first], found.samples)
    print_notes(console, model.notes)
    stage_S = [int(found.samples.stage_R[own[0]]) for own in slots.ranks]
    save_section(
        run,
        "placement",
        {
            "step_without_variation_ns": model.step_ns,
            **placement_json(study, found.samples, quantile, slowed, stage_S, model.notes, tails),
        },
    )


@dataclass(frozen=True, kw_only=True)
class _Slots:
    """Where nodes go: neighbouring ranks, the slots of a replica in the order of its stages."""

    ranks: list[tuple[int, ...]]
    replica_S: list[int]

    @property
    def first(self) -> list[int]:
        """Slots of the first replica."""
        return [s for s, replica in enumerate(self.replica_S) if replica == self.replica_S[0]]


@dataclass(frozen=True, kw_only=True)
class _PlacedJob:
    """A job whose nodes are placed."""

    recording: Recording
    model: Model
    slots: _Slots
    nodes: tuple[ClusterNode, ...]
    own_R: NDArray[np.float64]
    """Factors that recorded durations hold already."""
    quantile: float

    @property
    def is_modelled(self) -> bool:
        """Compared by the step that the run shows: its durations are one model's."""
        return self.recording.modelled_job is not None


def _by_steps(
    subject: _PlacedJob, rounds: int, seed: int, hot: list[float]
) -> tuple[PlacementStudy, list[HotNode]]:
    """A null run: many placements in one pass."""
    found = subject.recording
    # Ranks that cannot differ: their nodes' factors are all that tells ranks apart.
    small = quotient_of(found.samples, found.base, len(subject.slots.ranks[0]))
    base, fused = (small.base, small.fused) if small else (found.base, None)
    costs = PlacedSteps(base, fused, subject.slots.ranks, subject.nodes)
    study = find_placement(costs, subject.nodes, subject.slots.replica_S, seed=seed, rounds=rounds)
    slowed = (
        hot_node_study(
            costs.with_factors, len(subject.slots.ranks), hot, node_slots=subject.slots.first
        )
        if hot
        else []
    )
    return study, slowed


def _by_draws(
    subject: _PlacedJob, rounds: int, seed: int, hot: list[float], draws: int, steps: int | None
) -> tuple[PlacementStudy, list[HotNode]]:
    """Recorded durations: a quantile of the same draws for every placement."""
    model, slots = subject.model, subject.slots
    evaluate = Evaluator(
        model.graph,
        lambda factor_R: model.slowed(factor_R / subject.own_R),
        slots.ranks,
        subject.nodes,
        draws=draws,
        seed=seed,
        quantile=subject.quantile,
        steps=steps or model.steps,
    )
    study = find_placement(evaluate, subject.nodes, slots.replica_S, seed=seed, rounds=rounds)
    if not hot:
        return study, []
    return study, hot_node_study(
        lambda factor_PS: [evaluate.with_factors(factor_S) for factor_S in factor_PS],
        len(slots.ranks),
        hot,
        node_slots=slots.first,
    )


def _tails(
    subject: _PlacedJob, study: PlacementStudy, config: MonteCarlo
) -> tuple[PlacedTail, ...]:
    """How the shown placements of a null run vary, but for the devices, whose speed is known."""
    found = []
    for name, placed in (("given", study.given), ("best", study.best), ("worst", study.worst)):
        factor_R = np.ones(subject.recording.samples.graph.world_size)
        for own, n in zip(study.node_slots, placed.node_S, strict=True):
            factor_R[list(own)] = study.nodes[n].factor
        source, base = subject.model.slowed(factor_R)
        if isinstance(source, ProfileDraws):
            source = source.without(SPATIAL)
        drawn = draw_steps(subject.model.graph, source, subject.model.drawn(config), base=base)
        p50, far = (drawn.quantile_ns(q) for q in (0.5, subject.quantile))
        found.append(PlacedTail(name=name, step_ns=placed.step_ns, p50_ns=p50, far_ns=far))
    return tuple(found)


def _write_factors(run: Path, study: PlacementStudy) -> None:
    for name, placed in (("best", study.best), ("worst", study.worst)):
        factors_S = [study.nodes[n].factor for n in placed.node_S]
        write_text(run / f"placement-{name}.slow", slow_lines(study.node_slots, factors_S))


def _per_node(found: Recording, given: int | None) -> int:
    if given is not None or found.modelled_job is None or found.cluster is None:
        return given or 1
    return min(found.cluster.devices_per_node, found.samples.graph.world_size)


def _nodes(
    given: str, found: Recording, slots: list[tuple[int, ...]], seed: int
) -> tuple[tuple[ClusterNode, ...], NDArray[np.float64]]:
    """Nodes, and the factor that recorded durations of every rank hold already."""
    world_size = found.samples.graph.world_size
    own_R = np.ones(world_size)
    if given == FROM_PROFILE:
        return nodes_of_profile(_profile(found), len(slots), len(slots[0]), seed=seed), own_R
    if given != FROM_POOLS:
        tested = read_sniff_test(Path(given), world_size, len(slots[0]))
        return tested or read_nodes(Path(given)), own_R
    listed = nodes_of_recording(found.samples, slots)
    for node, own in zip(listed, slots, strict=True):
        own_R[list(own)] = node.factor
    return listed, own_R


def _profile(found: Recording) -> VariabilityProfile:
    if found.modelled_job is not None:
        return found.modelled_job.profile
    if found.cluster is not None and found.cluster.variability:
        return VariabilityProfile.load(found.cluster.variability)
    raise UsageError(
        "--nodes profile: neither the run nor its cluster names a variability profile; give one "
        "(--variability measured), or a CSV"
    )


def _node_slots(samples: StepSamples, ranks_per_node: int) -> _Slots:
    """Neighbouring ranks share a node; node slots of a pipeline replica in the order of its
    stages."""
    world_size = samples.graph.world_size
    if ranks_per_node < 1 or world_size % ranks_per_node:
        raise UsageError(f"{world_size} ranks do not fill nodes of {ranks_per_node}")
    stage_R, replica_R = samples.stage_R, samples.replica_R
    if (stage_R < 0).any():
        stage_R, replica_R = pipeline_places(samples.graph)
    slots = [
        tuple(range(first, first + ranks_per_node))
        for first in range(0, world_size, ranks_per_node)
    ]
    # A node that holds several replicas is named after the first.
    slots.sort(key=lambda own: (int(replica_R[own[0]]), int(stage_R[own[0]])))
    return _Slots(ranks=slots, replica_S=[int(replica_R[own[0]]) for own in slots])
