"""``prismscale place`` and ``explore``: other places and other layouts for one job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from prismscale.cluster import Cluster
from prismscale.commands.forecast_options import (
    DEFAULT_CV,
    Address,
    ClusterName,
    CommunicationCv,
    ComputeScale,
    Draws,
    ExecutorName,
    Kernels,
    Memory,
    Method,
    Run,
    Seed,
    Slow,
    Stalls,
    Steps,
    Variability,
    WhatIf,
    Workers,
    assumed,
    changes,
    draws_config,
    factors,
    numbers,
)
from prismscale.commands.forecast_results import candidate_json, placement_json, save_section
from prismscale.commands.forecast_tables import (
    print_base,
    print_hot_nodes,
    print_layouts,
    print_notes,
    print_placement,
)
from prismscale.cost.collective import CollectiveModel, collective_model
from prismscale.durations.samples import StepSamples
from prismscale.errors import UsageError
from prismscale.forecast.draws.executor import executor_named
from prismscale.forecast.layouts.captured import CapturedJob, relaid_difference
from prismscale.forecast.layouts.explore import OpenJob, candidates
from prismscale.forecast.layouts.explore import explore as explore_layouts
from prismscale.forecast.layouts.explore_job import ExploreJob
from prismscale.forecast.model import RECORDED, model_of
from prismscale.forecast.placement.node_placement import Evaluator, hot_node_study
from prismscale.forecast.placement.node_placement import place as find_placement
from prismscale.forecast.placement.nodes import ClusterNode, nodes_of_recording, read_nodes
from prismscale.forecast.recording import load_recording
from prismscale.graph.pipeline import pipeline_places
from prismscale.progress import TerminalReporter
from prismscale.runfolder import RunFolder

DEFAULT_CLUSTER = "h100-sxm"
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


def explore(
    job: Annotated[
        Path, typer.Argument(help="Run folder with a pipeline, or TOML of what a layer costs.")
    ],
    tp: Annotated[
        str, typer.Option(help="Tensor-parallel degrees.", show_default="the run's")
    ] = "",
    pp: Annotated[
        str, typer.Option(help="Pipeline-parallel degrees.", show_default="the run's")
    ] = "",
    schedule: Annotated[str, typer.Option(help="gpipe, 1f1b, interleaved, zero-bubble.")] = "1f1b",
    cluster: Annotated[
        str | None, typer.Option(help="Target cluster.", show_default="the run's, or h100-sxm")
    ] = None,
    communication_cv: Annotated[
        float | None, typer.Option(help="Variation of communication.", show_default="0.02")
    ] = None,
    draws: Draws = 200,
    seed: Seed = 0,
    steps: Steps = None,
    memory: Memory = 1.0,
    executor: ExecutorName = "local",
    workers: Workers = None,
    address: Address = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results.json and report.html.", show_default="the run's"),
    ] = None,
) -> None:
    """p50 and p95 of many layouts of one job, without running it."""
    console = Console(highlight=False)
    where = executor_named(executor, workers=workers, address=address)
    config = draws_config(draws, seed, steps, memory)
    subject = _subject(job, cluster, communication_cv)
    listed = candidates(
        subject.job,
        tp=numbers(tp, "--tp") if tp else [subject.tp],
        pp=numbers(pp, "--pp") if pp else [subject.pp],
        schedules=[s.strip() for s in schedule.split(",")],
        memory_bytes=subject.cluster.device.memory_bytes,
    )
    with TerminalReporter(console).stage("explore") as update:
        found = explore_layouts(
            subject.job, listed, subject.model, config, executor=where, progress=update
        )
    print_layouts(console, found)
    print_notes(console, subject.notes)
    root = out or (job if job.is_dir() else None)
    if root is not None:
        values = {"draws": draws, "seed": seed, "layouts": [candidate_json(c) for c in found]}
        _save(root, {"cluster": subject.cluster.name, **values, "notes": list(subject.notes)})
        console.print(f"written: {root / 'report.html'}", soft_wrap=True)


def _save(root: Path, values: dict[str, Any]) -> None:
    if not (root / "graph").is_dir():
        # A folder of its own, which must not be somebody else's.
        with RunFolder(root=root).opened(fresh=False):
            pass
    save_section(root, "layouts", values)


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """What is explored, and where it is to run."""

    job: OpenJob
    cluster: Cluster
    model: CollectiveModel
    tp: int = 1
    pp: int = 1
    notes: tuple[str, ...] = ()


def _subject(path: Path, cluster: str | None, communication_cv: float | None) -> _Subject:
    if not path.is_dir():
        target = Cluster.load(cluster or DEFAULT_CLUSTER)
        job = ExploreJob.load(path)
        if communication_cv is not None:
            job = job.with_communication_cv(communication_cv)
        return _Subject(job=job, cluster=target, model=collective_model(target))
    # Layouts take all communication from the model, so that they are compared on equal terms.
    recording = load_recording(path, cluster)
    target = recording.cluster or Cluster.load(DEFAULT_CLUSTER)
    model = collective_model(target)
    cv = DEFAULT_CV if communication_cv is None else communication_cv
    captured = CapturedJob.of(recording.samples, assumed(cv))
    own = captured.captured_layout
    off = relaid_difference(captured, recording.base.step_ns, model)
    vary = captured.variation
    told = "recorded" if recording.samples.n_steps > 1 else "assumed"
    notes = (
        f"captured as {own.name}, {own.microbatches} microbatches; the same layout by rule takes "
        f"{off:+.1%} of what the captured graph does",
        f"computation varies by {vary.compute_cv:.1%} ({told}), communication by "
        f"{vary.communication_cv:.1%} (assumed), collectives by the model of {target.name}",
    )
    return _Subject(job=captured, cluster=target, model=model, tp=own.tp, pp=own.pp, notes=notes)


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
