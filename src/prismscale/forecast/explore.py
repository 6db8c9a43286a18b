"""Exploring layouts: the step time's p50 and p95 of many ways to cut one job, before it runs.

Graphs are made by rule (:mod:`prismscale.forecast.layout`) from what one layer costs, so a layout
takes seconds. What that leaves out: gradients are reduced after the last backward and not while it
runs, and layers are alike.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prismscale.cost.collective import CollectiveModel
from prismscale.errors import FormatError, UsageError
from prismscale.forecast.executor import Executor
from prismscale.forecast.layout import Layout, PassCosts, build_layout, median_durations
from prismscale.forecast.lockstep import fuse
from prismscale.forecast.montecarlo import Draws, MonteCarlo, draw_steps
from prismscale.forecast.sampling import fuse_laws
from prismscale.forecast.schedules import in_flight, schedule
from prismscale.forecast.variation import Variation, vary
from prismscale.toml_dataclass import decode

INTERLEAVED_CHUNKS = 2
TP_COLLECTIVES_A_LAYER = 2
"""One after attention, one after the feed-forward part (Shoeybi et al. 2019, section 3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """What one layer costs for one microbatch, on one device, without tensor parallelism."""

    forward_ns: float
    input_gradient_ns: float
    weight_gradient_ns: float
    embedding_ns: float = 0.0
    head_ns: float = 0.0
    """Output layer and loss: further forward time of the last stage."""
    optimizer_ns: float = 0.0
    """Of one layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """What one layer moves and holds, without tensor parallelism."""

    boundary: int
    """Activation of one microbatch between two layers."""
    gradients: int
    state: int
    """Weights, gradients and optimizer state."""
    activations: int
    """Held from forward to backward, for one microbatch."""
    ends_state: int = 0
    """State of embedding and output layer, on the first and the last stage."""


@dataclass(frozen=True, kw_only=True)
class ExploreJob:
    """A job whose layout is open."""

    world_size: int
    layers: int
    global_batch: int
    micro_batch: int
    costs: LayerCosts
    bytes: LayerBytes
    variation: Variation = field(default_factory=Variation)

    def __post_init__(self) -> None:
        for name in ("world_size", "layers", "global_batch", "micro_batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; at least 1 is needed")

    @classmethod
    def load(cls, path: Path) -> ExploreJob:
        """Read a job from TOML.

        Raises:
            UsageError: the file cannot be read. FormatError: it is damaged; names the key.
        """
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read job file '{path}': {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FormatError(f"{path}: not valid TOML: {error}") from error
        return decode(cls, table, str(path))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout and what became of it."""

    name: str
    layout: Layout | None
    peak_bytes: int = 0
    draws: Draws | None = None
    why_not: str = ""
    """Empty where it was forecast."""


def candidates(
    job: ExploreJob,
    *,
    tp: Sequence[int],
    pp: Sequence[int],
    schedules: Sequence[str],
    memory_bytes: int,
) -> list[Candidate]:
    """Every combination; those that cannot be say why."""
    return [_candidate(job, t, p, name, memory_bytes) for name in schedules for t in tp for p in pp]


def explore(
    job: ExploreJob,
    listed: Sequence[Candidate],
    model: CollectiveModel,
    config: MonteCarlo,
    *,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Candidate]:
    """Forecast every layout that is possible; the fastest p95 first, the impossible last."""
    done = []
    for i, candidate in enumerate(listed):
        if candidate.layout is not None and not candidate.why_not:
            draws = forecast_layout(job, candidate.layout, model, config, executor=executor)
            candidate = Candidate(
                name=candidate.name,
                layout=candidate.layout,
                peak_bytes=candidate.peak_bytes,
                draws=draws,
            )
        done.append(candidate)
        if progress is not None:
            progress(i + 1, len(listed))
    return sorted(done, key=lambda c: c.draws.quantile_ns(0.95) if c.draws else float("inf"))


def forecast_layout(
    job: ExploreJob,
    layout: Layout,
    model: CollectiveModel,
    config: MonteCarlo,
    *,
    executor: Executor | None = None,
) -> Draws:
    """Step times of one layout."""
    graph = build_layout(layout, pass_costs(job, layout))
    source = vary(graph, median_durations(graph, model), job.variation)
    fused = fuse(graph)
    if fused is not None:
        graph, source = fused.graph, fuse_laws(fused, source, seed=config.seed)
    return draw_steps(graph, source, config, executor=executor)


def pass_costs(job: ExploreJob, layout: Layout) -> PassCosts:
    """Costs of one chunk of one stage: its layers, cut over the tensor-parallel group."""
    layers = job.layers / (layout.pp * layout.chunks)
    per_device = layers / layout.tp
    costs, sizes = job.costs, job.bytes
    return PassCosts(
        forward_ns=round(costs.forward_ns * per_device),
        input_gradient_ns=round(costs.input_gradient_ns * per_device),
        weight_gradient_ns=round(costs.weight_gradient_ns * per_device),
        optimizer_ns=round(costs.optimizer_ns * per_device * layout.chunks),
        first_stage_ns=round(costs.embedding_ns / layout.tp),
        last_stage_ns=round(costs.head_ns / layout.tp),
        tp_collectives=max(1, round(TP_COLLECTIVES_A_LAYER * layers)),
        tp_bytes=sizes.boundary,
        boundary_bytes=sizes.boundary // layout.tp,
        gradient_bytes=round(sizes.gradients * per_device * layout.chunks),
    )


def peak_bytes(job: ExploreJob, layout: Layout) -> int:
    """Memory of the fullest stage: state of its layers, and activations of what is in flight."""
    per_chunk = job.layers / (layout.pp * layout.chunks) / layout.tp
    most = 0.0
    for stage in range(layout.pp):
        actions = schedule(
            layout.schedule,
            stage=stage,
            stages=layout.pp,
            microbatches=layout.microbatches,
            chunks=layout.chunks,
        )
        held = per_chunk * (
            layout.chunks * job.bytes.state + in_flight(actions) * job.bytes.activations
        )
        if stage in (0, layout.pp - 1):
            held += job.bytes.ends_state / layout.tp
        most = max(most, held)
    return round(most)


def _candidate(job: ExploreJob, tp: int, pp: int, name: str, memory_bytes: int) -> Candidate:
    chunks = INTERLEAVED_CHUNKS if name == "interleaved" else 1
    label = f"TP{tp} PP{pp} {name}"
    if job.world_size % (tp * pp):
        return Candidate(name=label, layout=None, why_not=f"{job.world_size} ranks do not divide")
    dp = job.world_size // (tp * pp)
    if job.global_batch % (dp * job.micro_batch):
        why = f"batch {job.global_batch} does not divide by DP {dp} × {job.micro_batch}"
        return Candidate(name=label, layout=None, why_not=why)
    if job.layers % (pp * chunks):
        why = f"{job.layers} layers do not divide by {pp * chunks} chunks"
        return Candidate(name=label, layout=None, why_not=why)
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        microbatches=job.global_batch // (dp * job.micro_batch),
        schedule=name,
        chunks=chunks,
    )
    try:
        needed = peak_bytes(job, layout)
    except UsageError as error:
        return Candidate(name=layout.name, layout=None, why_not=str(error))
    why = ""
    if needed > memory_bytes:
        why = f"needs {needed / 2**30:.1f} of {memory_bytes / 2**30:.1f} GiB"
    return Candidate(name=layout.name, layout=layout, peak_bytes=needed, why_not=why)
