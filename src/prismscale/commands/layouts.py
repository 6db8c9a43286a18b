"""``prismscale place``: other places for the ranks of one job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from prismscale.commands.forecast_options import (
    DEFAULT_CV,
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
    assumed,
    changes,
    factors,
)
from prismscale.commands.forecast_results import placement_json, save_section
from prismscale.commands.forecast_tables import (
    print_base,
    print_hot_nodes,
    print_notes,
    print_placement,
)
from prismscale.durations.samples import StepSamples
from prismscale.errors import UsageError
from prismscale.forecast.model import RECORDED, model_of
from prismscale.forecast.placement.node_placement import Evaluator, hot_node_study
from prismscale.forecast.placement.node_placement import place as find_placement
from prismscale.forecast.placement.nodes import ClusterNode, nodes_of_recording, read_nodes
from prismscale.forecast.recording import load_recording
from prismscale.graph.pipeline import pipeline_places

FROM_POOLS = "pools"


def place(
    run: Run,
    nodes: Annotated[
        str,
        typer.Option(
            help="CSV with columns node and factor (or speed, or seconds of a health check); "
            "pools: the speeds that the recording shows."
        ),
    ],
    ranks_per_node: Annotated[int, typer.Option(help="Ranks that one node hosts.")] = 1,
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
    variability: Variability = RECORDED,
    communication_cv: CommunicationCv = DEFAULT_CV,
    stalls: Stalls = 0.0,
    method: Method = "auto",
    steps: Steps = None,
    seed: Seed = 0,
) -> None:
    """Which node of unequal speed should host which stage and rank."""
    if not 0 < quantile < 1:
        raise UsageError(f"--quantile {quantile}: it lies between 0 and 1")
    console = Console(highlight=False)
    recording = load_recording(
        run,
        changes=changes(cluster, compute_scale, slow, kernels, what_if),
        variation=assumed(communication_cv, stalls),
    )
    samples = recording.samples
    model = model_of(recording, method=method, fused=False, variability=variability)
    node_slots, replicas = _node_slots(samples, ranks_per_node)
    listed, own_R = _nodes(nodes, samples, node_slots)
    evaluate = Evaluator(
        model.graph,
        lambda factor_R: model.slowed(factor_R / own_R),
        node_slots,
        listed,
        draws=draws,
        seed=seed,
        quantile=quantile,
        steps=steps or model.steps,
    )
    study = find_placement(evaluate, listed, replicas, seed=seed, rounds=rounds)
    print_base(console, model.step_ns)
    print_placement(console, study, samples, quantile)
    first = [s for s, replica in enumerate(replicas) if replica == replicas[0]]
    slowed = (
        hot_node_study(
            evaluate.with_factors, len(node_slots), factors(hot, "--hot"), node_slots=first
        )
        if hot
        else []
    )
    if slowed:
        print_hot_nodes(console, slowed, [node_slots[s][0] for s in first], samples)
    print_notes(console, model.notes)
    stage_S = [int(samples.stage_R[node_slot[0]]) for node_slot in node_slots]
    save_section(
        run,
        "placement",
        {
            "step_without_variation_ns": model.step_ns,
            **placement_json(study, samples, quantile, slowed, stage_S, model.notes),
        },
    )


def _nodes(
    given: str, samples: StepSamples, node_slots: list[tuple[int, ...]]
) -> tuple[tuple[ClusterNode, ...], NDArray[np.float64]]:
    """Nodes, and the factor that recorded durations of every rank hold already."""
    own_R = np.ones(samples.graph.world_size)
    if given != FROM_POOLS:
        return read_nodes(Path(given)), own_R
    listed = nodes_of_recording(samples, node_slots)
    for node, node_slot in zip(listed, node_slots, strict=True):
        own_R[list(node_slot)] = node.factor
    return listed, own_R


def _node_slots(
    samples: StepSamples, ranks_per_node: int
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Neighbouring ranks share a node; node slots of a pipeline replica in the order of its
    stages."""
    world_size = samples.graph.world_size
    if ranks_per_node < 1 or world_size % ranks_per_node:
        raise UsageError(f"{world_size} ranks do not fill nodes of {ranks_per_node}")
    stage_R, replica_R = samples.stage_R, samples.replica_R
    if (stage_R < 0).any():
        stage_R, replica_R = pipeline_places(samples.graph)
    node_slots = [
        tuple(range(first, first + ranks_per_node))
        for first in range(0, world_size, ranks_per_node)
    ]
    # A node that holds several replicas is named after the first.
    node_slots.sort(
        key=lambda node_slot: (int(replica_R[node_slot[0]]), int(stage_R[node_slot[0]]))
    )
    return node_slots, [int(replica_R[node_slot[0]]) for node_slot in node_slots]
