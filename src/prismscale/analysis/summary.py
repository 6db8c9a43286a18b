"""Computes the figures of a run from its graph, its timeline and its observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prismscale.analysis.attribution import Breakdown, break_down
from prismscale.analysis.emulated import (
    Emulated,
    KernelKind,
    coverage,
    eager_regions,
    kernel_error,
    kernel_kinds,
    largest_kernels,
    stand_in_shares,
    unknown_operators,
    value_uses,
)
from prismscale.analysis.job_work import JobWork
from prismscale.analysis.observation import Observation
from prismscale.analysis.overload import RouterFindings
from prismscale.analysis.payload_use import PayloadKind, PayloadUse, PayloadUses, all_uses
from prismscale.analysis.result import (
    ClassResult,
    EventResult,
    LiveResult,
    RunResult,
    SourceShare,
    StageResult,
    StandstillResult,
    StepSpread,
)
from prismscale.analysis.stages import classes_by_stage, stage_name
from prismscale.analysis.step_error import host_error
from prismscale.analysis.switched import SwitchCounts
from prismscale.analysis.wanted import Wanted
from prismscale.cluster import Cluster
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.what_if.effects import Effect
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.pipeline import stage_of
from prismscale.graph.trace import MemoryRecord
from prismscale.sim.event_cost import EventCost
from prismscale.sim.retime import Retimed
from prismscale.sim.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The results of a run's stages, which the figures are computed from."""

    graph: JobGraph
    durations: GraphDurations
    retimed: Retimed
    observed: Sequence[Observation]
    distinct_axes: tuple[str, ...]
    witnesses: tuple[int, ...]
    memory: Mapping[int, MemoryRecord]
    """Memory record by captured rank, for ranks whose memory was tracked."""
    captured: tuple[int, ...]
    emulated: tuple[Emulated, ...] = ()
    """One for each captured rank of a null device."""
    payload: PayloadKind = PayloadKind.RECORDED
    """The first source that was asked for the contributions of absent peers."""
    payloads: tuple[PayloadUses, ...] = ()
    """Sources of absent peers' contributions, one entry for each captured rank."""
    routers: RouterFindings = field(default_factory=RouterFindings)
    """The choices of expert routers."""
    events: tuple[EventCost, ...] = ()
    """Periodic events, which occur only in some steps."""
    unmatched: tuple[str, ...] = ()
    """For each periodic event whose ranks do not fit together, the reason."""
    switched: SwitchCounts | None = None
    """None unless the run used real values."""
    effects: tuple[Effect, ...] = ()
    """The what-ifs of the run, with what each touches."""
    step_without_ns: int | None = None
    checked: tuple[int, ...] = ()
    """Ranks besides the captured ones whose first steps were compared (``--check``)."""
    standstill: StandstillResult | None = None
    """The cause of a hang; None where the job does not hang."""
    work: JobWork = field(default_factory=JobWork)
    """Work of one step, on a null device."""
    spread: StepSpread | None = None
    """Distribution of the step time."""


def summarise(
    found: Findings,
    *,
    command: str,
    cluster: Cluster,
    device: str,
    variability: str,
    wall_s: dict[str, float],
    peak_rss_bytes: int,
    wanted: Wanted | None = None,
) -> RunResult:
    """Compute the figures of a run."""
    graph, timeline = found.graph, found.retimed.timeline
    stages = tuple(
        _stage(stage, classes, timeline, _memory_of(classes, found))
        for stage, classes in classes_by_stage(graph).items()
    )
    simulated = found.retimed.job_step_ns_T
    kernels = kernel_kinds(found.emulated)
    return RunResult(
        command=command,
        world_size=graph.world_size,
        cluster=cluster.name,
        device=device,
        variability=variability,
        calibration=cluster.device.calibration if found.emulated else None,
        step_ns=found.retimed.step_ns,
        step_spread_ns=(int(simulated.min()), int(simulated.max())),
        sampled_steps=len(simulated) if found.durations.n_samples > 1 else 1,
        stages=stages,
        classes=tuple(_class(graph, c) for c in graph.classes),
        live=tuple(_live(o, found.retimed) for o in found.observed),
        sources=_sources(
            [s.breakdown for s in stages],
            found,
            _computation(found, kernels, device, cluster),
            cluster,
        ),
        distinct_axes=found.distinct_axes,
        witnesses=found.witnesses,
        switched=found.switched,
        captured=found.captured,
        samples=min(c.trace.n_samples for c in graph.classes),
        hangs=_hangs(timeline),
        rank_nodes=graph.n_rank_nodes,
        checked=found.checked,
        standstill=found.standstill,
        events=_events(found),
        unmatched_events=found.unmatched,
        watched_steps=max(c.trace.facts.watched_steps for c in graph.classes),
        settled_after=_settled_after(found.retimed),
        kernels=kernels,
        largest_kernels=largest_kernels(found.emulated),
        unknown_operators=unknown_operators(found.emulated),
        stand_ins=stand_in_shares(found.emulated),
        eager_regions=eager_regions(found.emulated),
        values=value_uses(found.emulated),
        payload=found.payload,
        payloads=_payloads(found),
        routers=found.routers,
        what_ifs=found.effects,
        step_without_ns=found.step_without_ns,
        spread=found.spread,
        work=found.work,
        capacity_bytes=0 if cluster.processor_communicates else cluster.device.memory_bytes,
        peak_flops=cluster.device.peak_flops.get(found.work.dtype, 0.0),
        wanted=wanted or Wanted(),
        wall_s=wall_s,
        peak_rss_bytes=peak_rss_bytes,
    )


def _payloads(found: Findings) -> tuple[PayloadUse, ...]:
    live = (PayloadUses(uses=observed.payloads) for observed in found.observed)
    return all_uses([*found.payloads, *live])


def _events(found: Findings) -> tuple[EventResult, ...]:
    whole_ns = found.retimed.step_ns + sum(e.per_step_ns for e in found.events)
    return tuple(
        EventResult(
            first=event.facts.numbers[0],
            every=event.facts.every,
            seen=len(event.facts.numbers),
            extra_ns=event.extra_ns,
            share=event.per_step_ns / whole_ns if whole_ns else 0.0,
            site=event.facts.site,
            checkpoint_bytes=event.facts.checkpoint_bytes,
        )
        for event in found.events
    )


def _settled_after(retimed: Retimed) -> int:
    steady = retimed.steady
    return steady.steps if steady is not None and steady.settled else 0


def _memory_of(classes: Sequence[RankClass], found: Findings) -> list[tuple[int, MemoryRecord]]:
    """Return rank and memory record of every captured rank in ``classes``.

    Ranks of one class may hold different amounts: shards of a tensor that does not divide evenly.
    """
    indices = {c.index for c in classes}
    class_of_R = found.graph.class_of_R
    return [pair for pair in found.memory.items() if int(class_of_R[pair[0]]) in indices]


def _stage(
    stage: int | None,
    classes: Sequence[RankClass],
    timeline: Timeline,
    records: Sequence[tuple[int, MemoryRecord]],
) -> StageResult:
    first = int(min(c.members_M[0] for c in classes))
    rank, fullest = max(records, key=lambda pair: _held_bytes(pair[1]), default=(None, None))
    return StageResult(
        name=stage_name(stage),
        ranks=sum(c.size for c in classes),
        first_rank=first,
        breakdown=break_down(timeline, first),
        peak_bytes=fullest.peak_bytes if fullest else None,
        memory_source=records[0][1].source if records else "untracked",
        reserved_bytes=fullest.reserved_bytes if fullest else None,
        outside=fullest.outside if fullest else (),
        fullest_rank=rank,
    )


def _held_bytes(record: MemoryRecord) -> tuple[int, int]:
    """Return what a GPU holds, and what tensors hold of it: all that is known on a CPU."""
    outside = sum(part.n_bytes for part in record.outside)
    return (record.reserved_bytes or 0) + outside, record.peak_bytes


def _class(graph: JobGraph, rank_class: RankClass) -> ClassResult:
    coverage = graph.coverage[rank_class.index]
    return ClassResult(
        index=rank_class.index,
        stage=stage_name(stage_of(rank_class)),
        ranks=rank_class.size,
        captured=coverage.captured,
        assumed=coverage.assumed,
        nodes=rank_class.trace.n_body,
    )


def _live(observed: Observation, retimed: Retimed) -> LiveResult:
    steps = np.diff(np.array(observed.step_end_ns, dtype=np.int64))
    return LiveResult(
        rank=observed.rank,
        step_ns=tuple(int(s) for s in steps),
        median_step_ns=int(np.median(steps)) if len(steps) else 0,
        predicted_step_ns=int(np.median(retimed.rank_step_ns_TR[:, observed.rank])),
        waited_ns=_median(observed.step_wait_ns[1:]),
        lag_ns=_median(observed.step_lag_ns[1:]),
        peak_bytes=observed.peak_bytes,
        boot_s=observed.boot_s,
        communications=observed.communications,
        uncovered=observed.uncovered,
        moved=observed.moved,
    )


def _median(values: Sequence[int]) -> int:
    return int(np.median(values)) if values else 0


def _sources(
    breakdowns: Sequence[Breakdown], found: Findings, computation: str, cluster: Cluster
) -> tuple[SourceShare, ...]:
    total = sum(b.step_ns for b in breakdowns)
    host = _ratio(sum(b.host_ns for b in breakdowns), total)
    compute = _ratio(sum(b.total_compute_ns for b in breakdowns), total) - host
    exposed = _ratio(sum(b.total_exposed_ns for b in breakdowns), total)
    return (
        SourceShare(
            source=computation,
            share=compute,
            error=_kernel_error(found) if found.emulated else _variation(found.graph),
        ),
        *([_launches(host, cluster)] if found.emulated else []),
        SourceShare(
            source=_communication(found.graph, cluster.name),
            share=exposed,
            error="see docs/accuracy.md",
        ),
        SourceShare(
            source="waiting, derived from the graph",
            share=_ratio(sum(b.bubble_ns + b.skew_ns for b in breakdowns), total),
            error="follows from those above",
        ),
    )


def _launches(share: float, cluster: Cluster) -> SourceShare:
    bar = host_error(cluster.device.calibration)
    below, above = (f"{100 * error:.0f} %" for error in (bar.below, bar.above))
    return SourceShare(
        source=f"waiting for the host's launches, {_modelled(cluster)}",
        share=share,
        error=f"-{below} to +{above}: hosts and programs differ",
    )


def _modelled(cluster: Cluster) -> str:
    known = f"modelled for {cluster.name}"
    if cluster.device.calibration is None:
        return known
    steps = cluster.device.calibration.steps
    return f"{known}, calibrated by {steps} measured step{'s' if steps > 1 else ''}"


def _communication(graph: JobGraph, cluster: str) -> str:
    if all(c.trace.facts.co_run for c in graph.classes):
        return "communication, measured between captured ranks where they fit the cores"
    return f"communication, modelled for {cluster}"


def _computation(
    found: Findings, kernels: Sequence[KernelKind], device: str, cluster: Cluster
) -> str:
    if not found.emulated:
        return f"computation, measured on this {device}"
    unknown = 1 - coverage(kernels)
    known = f"; {100 * unknown:.1f} % of it by default" if unknown else ""
    return f"computation, {_modelled(cluster)}{known}"


def _kernel_error(found: Findings) -> str:
    error = kernel_error(use for rank in found.emulated for use in rank.kernels)
    if error < 0:
        return "error of its kernels: unknown"
    return f"±{100 * error:.0f} % if all its kernels err alike (p90 of each kind)"


def _hangs(timeline: Timeline) -> tuple[str, ...]:
    """Return one sentence per hang, causes before consequences.

    A hang is a consequence if a rank that is missing in it waits itself.
    """
    waiting = {r for h in timeline.hangs for r in h.group if r not in h.missing}
    by_cause = sorted(timeline.hangs, key=lambda h: not waiting.isdisjoint(h.missing))
    return tuple(dict.fromkeys(h.sentence() for h in by_cause))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _variation(graph: JobGraph) -> str:
    """Say how much the computation of single captured steps differs from their median."""
    samples = min(c.trace.n_samples for c in graph.classes)
    if samples < 2:
        return "one captured step: unknown"
    deviations = []
    for trace in (c.trace for c in graph.classes):
        total_S = trace.compute_ns_S
        middle = float(np.median(total_S)) or 1.0
        deviations.append(float(np.abs(total_S - middle).max()) / middle)
    within = f"{100 * np.median(deviations):.1f} %"
    return f"single captured steps within ±{within} of the median ({samples} steps)"
