"""``prismscale place``: which node of unequal speed hosts which part of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

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
from prismscale.durations.slow_ranks import slow_lines
from prismscale.errors import UsageError
from prismscale.files import write_text
from prismscale.forecast.draws.executor import LocalProcesses
from prismscale.forecast.model import model_of
from prismscale.forecast.placement.node_placement import PlacedTail, PlacementStudy
from prismscale.forecast.placement.nodes import (
    ClusterNode,
    nodes_of_profile,
    nodes_of_recording,
    read_nodes,
    read_sniff_test,
)
from prismscale.forecast.placement.placed_job import (
    PlacedJob,
    Search,
    keeps_nodes_whole,
    node_slots,
    profile_of,
    ranks_of_a_node,
)
from prismscale.forecast.recording import Recording
from prismscale.progress import TerminalReporter, terminal

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
    search: Annotated[
        bool | None,
        typer.Option(
            "--search/--all", help="Search, or try all.", show_default="all where they are few"
        ),
    ] = None,
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
    console = terminal()
    asked = changes(cluster, compute_scale, slow, kernels, variability, what_if)
    found = recording(run, asked, communication_cv, stalls)
    slots = node_slots(found.samples, ranks_of_a_node(found, ranks_per_node))
    fused = keeps_nodes_whole(found, slots) and found.modelled_job is not None
    model = model_of(found, method=method, fused=fused)
    listed, own_R = _nodes(nodes, found, slots.ranks, seed)
    subject = PlacedJob(recording=found, model=model, slots=slots, nodes=listed, own_R=own_R)
    hot_factors = factors(hot, "--hot") if hot else []
    looking = Search(rounds=rounds, exhaustive=None if search is None else not search, seed=seed)
    tails: tuple[PlacedTail, ...] = ()
    reporter = TerminalReporter(console)
    if subject.is_modelled:
        with reporter.stage("search") as update:
            study, slowed = subject.by_steps(looking, hot_factors, update)
        config = draws_config(max(draws, TAIL_DRAWS), seed, steps, 1.0)
        with reporter.stage("draw") as update:
            tails = subject.tails(study, quantile, config, LocalProcesses(), update)
        _write_factors(run, study)
    else:
        with reporter.stage("search") as update:
            study, slowed = subject.by_draws(
                looking, hot_factors, update, quantile=quantile, draws=draws, steps=steps
            )
    print_base(console, model.step_ns)
    compared = None if subject.is_modelled else quantile
    print_placement(console, study, found.samples, compared)
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
            **placement_json(study, found.samples, compared, slowed, stage_S, model.notes, tails),
        },
    )


def _write_factors(run: Path, study: PlacementStudy) -> None:
    for name, placed in (("best", study.best), ("worst", study.worst)):
        factors_S = [study.nodes[n].factor for n in placed.node_S]
        write_text(run / f"placement-{name}.slow", slow_lines(study.node_slots, factors_S))


def _nodes(
    given: str, found: Recording, slots: Sequence[tuple[int, ...]], seed: int
) -> tuple[tuple[ClusterNode, ...], NDArray[np.float64]]:
    """Nodes, and the factor that recorded durations of every rank hold already."""
    world_size = found.samples.graph.world_size
    own_R = np.ones(world_size)
    if given == FROM_PROFILE:
        return nodes_of_profile(profile_of(found), len(slots), len(slots[0]), seed=seed), own_R
    if given != FROM_POOLS:
        tested = read_sniff_test(Path(given), world_size, len(slots[0]))
        return tested or read_nodes(Path(given)), own_R
    listed = nodes_of_recording(found.samples, slots)
    for node, own in zip(listed, slots, strict=True):
        own_R[list(own)] = node.factor
    return listed, own_R
