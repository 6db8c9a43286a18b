"""What the forecast commands print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Column, Table

from prismscale.durations.samples import StepSamples
from prismscale.forecast.distributions.scaling import TailAtWidth
from prismscale.forecast.guarantees import Estimate
from prismscale.forecast.placement.node_placement import HotNode, PlacedTail, PlacementStudy
from prismscale.forecast.run_spread import RunSpread, VariationShare
from prismscale.forecast.sensitivity import Sensitivity
from prismscale.forecast.sobol import SobolIndex
from prismscale.forecast.training import (
    DAY_S,
    TrainingPlan,
    TrainingTime,
    daly_interval_s,
    young_interval_s,
)
from prismscale.sim.event_cost import EventCost

MOST_FACTORS = 12
"""Lines of sensitivities; ``results.json`` and the report hold all."""
MOST_NODE_SLOTS = 32
"""Lines of a placement."""


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """What a forecast says."""

    step_ns_D: NDArray[np.int64]
    base_ns: int
    """Without variation."""
    plan: TrainingPlan
    gpus: int
    quantile: float
    slower: float
    quantiles: Mapping[float, Estimate]
    slow: Estimate
    whole: TrainingTime
    best_interval_s: float | None
    """Between checkpoints, of the simulated law; None where nothing fails."""
    spread: RunSpread | None
    """None where draws do not tell runs from steps."""
    growth: Sequence[TailAtWidth]

    @property
    def variation(self) -> float:
        """What variation costs: the median step over the one without, minus 1."""
        return float(np.median(self.step_ns_D)) / self.base_ns - 1 if self.base_ns else 0.0

    @property
    def parts_days(self) -> dict[str, float]:
        """What the mean training goes into."""
        whole, plan = self.whole, self.plan
        still = self.base_ns * plan.steps / 1e9 / DAY_S
        events = plan.extra_ns * plan.steps / 1e9 / DAY_S
        return {
            "steps without variation": still,
            "variation": float(whole.steps_D.mean()) - still - events,
            "periodic events": events,
            "checkpoints": float(whole.checkpoints_D.mean()),
            "work done again": float(whole.redone_D.mean()),
            "restarts, other nodes": float(whole.down_D.mean()),
        }


def print_base(console: Console, step_ns: int) -> None:
    """The one step that all commands on a run start from."""
    console.print(f"step without variation: {step_ns / 1e6:,.3f} ms")


def print_promise(console: Console, promise: Guarantee) -> None:
    """Quantiles, slow steps, days of training, wider jobs."""
    table = Table("step time", Column("ms", justify="right"), "95 % interval")
    for q, estimate in promise.quantiles.items():
        interval = f"{estimate.low / 1e6:,.3f} … {estimate.high / 1e6:,.3f}"
        table.add_row(f"p{q * 100:g}", f"{estimate.value / 1e6:,.3f}", interval)
    console.print(table)
    if promise.variation:
        gap_ms = (float(np.median(promise.step_ns_D)) - promise.base_ns) / 1e6
        console.print(
            f"variation costs {promise.variation:.2%}: p50 is {gap_ms:,.3f} ms above the step "
            "without it"
        )
    slow, plan, whole = promise.slow, promise.plan, promise.whole
    console.print(
        f"P(step > {promise.slower:g} × median) = {slow.value:.2%} "
        f"({slow.low:.2%} … {slow.high:.2%})"
    )
    name = f"p{promise.quantile * 100:g}"
    slow_ns = promise.quantiles[promise.quantile].value + plan.extra_ns
    every = slow_ns * plan.steps / 1e9 / DAY_S
    console.print(
        f"{plan.steps:,} steps: p50 {whole.days(0.5):,.2f}, {name} "
        f"{whole.days(promise.quantile):,.2f} days; {every:,.2f} if every step took its {name}"
    )
    _print_parts(console, promise)
    if promise.best_interval_s is not None:
        young = young_interval_s(plan.checkpoint_s, plan.job_mtbf_s)
        daly = daly_interval_s(plan.checkpoint_s, plan.job_mtbf_s)
        console.print(
            f"{np.median(whole.failures_D):.0f} failures; a checkpoint every "
            f"{whole.interval_s:,.0f} s (Young: {young:,.0f}, Daly: {daly:,.0f}, fewest days "
            f"simulated: {promise.best_interval_s:,.0f} s)"
        )
    if promise.spread is None:
        _print_growth(console, promise.growth)


def _print_parts(console: Console, promise: Guarantee) -> None:
    """Where the days go, and the GPU-hours."""
    table = Table("the training, on average", Column("days", justify="right"), "")
    parts = promise.parts_days
    total = sum(parts.values())
    for name, days in parts.items():
        if days:
            table.add_row(name, f"{days:z,.2f}", f"{days / total:z.1%}")
    table.add_row("all", f"{total:,.2f}", f"{total * 24 * promise.gpus:,.0f} GPU-hours")
    console.print(table)


def print_spread(console: Console, spread: RunSpread, sources: Sequence[VariationShare]) -> None:
    """What differs from step to step and from run to run, and what each source does to it."""
    console.print(
        f"from step to step of one run: CV {spread.within_cv:.2%}, p95 {spread.within_p95:.2%} "
        f"above the median; from run to run, on other machines: CV {spread.between_cv:.2%}"
    )
    log = spread.log
    console.print(
        f"a log of {log.steps:,} steps shows: CV {log.cv:.2%} "
        f"({log.cv_low:.2%} … {log.cv_high:.2%}), p95 {log.p95:.2%} above the median"
    )
    if not sources:
        return
    share = Column("of p95 - p50", justify="right")
    table = Table("variation", share, Column("p50 without it, ms", justify="right"))
    for source in sorted(sources, key=lambda s: -s.share):
        table.add_row(source.name, f"{source.share:.0%}", f"{source.p50_ns / 1e6:,.3f}")
    console.print(table)


def _print_growth(console: Console, growth: Sequence[TailAtWidth]) -> None:
    ms = [Column(f"{q}, ms", justify="right") for q in ("p50", "p95", "p99")]
    table = Table("replicas", *ms, "", title="wider jobs: upper bounds by order statistics")
    for g in growth:
        note = "" if g.resolved else "too few draws"
        shown = (f"{ns / 1e6:,.3f}" for ns in (g.p50_ns, g.p95_ns, g.p99_ns))
        table.add_row(f"× {g.width:g}", *shown, note)
    console.print(table)


def print_sensitivity(console: Console, found: Sensitivity, sobol: Sequence[SobolIndex]) -> None:
    """Leading factors by what their steadiness gains, with their Sobol indices where known."""
    figures = [Column(h, justify="right") for h in ("p95, ms", "p95 falls", "std falls")]
    indices = [Column(h, justify="right") for h in ("first", "total")] if sobol else []
    table = Table(Column("made steady", no_wrap=True), *figures, *indices)
    by_name = {i.name: i for i in sobol}
    shown = found.ablations[:MOST_FACTORS]
    for a in shown:
        index = by_name.get(a.name)
        cells = [""] * len(indices)
        if index:
            cells = [
                f"{index.first:.2f} ± {index.first_error:.2f}",
                f"{index.total:.2f} ± {index.total_error:.2f}",
            ]
        gains = (f"{a.p95_ns / 1e6:,.3f}", f"{a.p95_gain:.2%}", f"{a.std_gain:.1%}")
        table.add_row(a.name, *gains, *cells)
    console.print(table)
    rest = found.ablations[MOST_FACTORS:]
    if rest:
        console.print(f"… and {len(rest)} more, {rest[0].p95_gain:.2%} or less each")
    console.print(
        f"as it is: p50 {found.base_p50_ns / 1e6:,.3f}, p95 {found.base_p95_ns / 1e6:,.3f} ms"
    )


def placed_by(quantile: float | None) -> str:
    """Return by what placements were compared: a quantile, or None."""
    if quantile is None:
        return "step without other variation"
    return f"p{quantile * 100:g} of the step"


def print_placement(
    console: Console, study: PlacementStudy, samples: StepSamples, quantile: float | None
) -> None:
    """The best placement, node slot by node slot, and what it gains. ``quantile``: by which
    placements were compared; None: by the step without other variation."""
    table = Table("stage", "replica", "ranks", "node", "factor")
    placed = list(zip(study.node_slots, study.best.node_S, strict=True))
    for node_slot, n in placed[:MOST_NODE_SLOTS]:
        node = study.nodes[n]
        ranks = str(node_slot[0]) if len(node_slot) == 1 else f"{node_slot[0]}-{node_slot[-1]}"
        stage, replica = samples.stage_R[node_slot[0]], samples.replica_R[node_slot[0]]
        table.add_row(str(stage), str(replica), ranks, node.name, f"{node.factor:.3f}")
    console.print(table)
    if len(placed) > MOST_NODE_SLOTS:
        console.print(f"… and {len(placed) - MOST_NODE_SLOTS} more in results.json and report.html")
    how = "all different ones" if study.exhaustive else "search"
    what = placed_by(quantile)
    console.print(
        f"{what}: given order {study.given.step_ns / 1e6:,.3f} ms, best "
        f"{study.best.step_ns / 1e6:,.3f} ms ({study.gain:.3f}× faster), worst seen "
        f"{study.worst.step_ns / 1e6:,.3f} ms; {study.tried} placements tried ({how})"
    )


def print_placed_tails(console: Console, tails: Sequence[PlacedTail], quantile: float) -> None:
    """How the shown placements vary."""
    if not tails:
        return
    heads = ("as run --slow shows it, ms", "p50, ms", f"p{quantile * 100:g}, ms")
    table = Table("placement", *(Column(h, justify="right") for h in heads))
    for tail in tails:
        figures = (tail.step_ns, tail.p50_ns, tail.far_ns)
        table.add_row(tail.name, *(f"{ns / 1e6:,.3f}" for ns in figures))
    console.print(table)


def print_hot_nodes(
    console: Console, found: Sequence[HotNode], ranks: Sequence[int], samples: StepSamples
) -> None:
    """What one slow node costs, by the stage that it hosts."""
    slow = sorted({h.factor for h in found})
    table = Table("one slow node at", *(Column(f"× {f:g}", justify="right") for f in slow))
    node_slots = list(dict.fromkeys(h.node_slot for h in found))
    for node_slot, rank in zip(node_slots, ranks, strict=True):
        costs = {h.factor: h.slowdown for h in found if h.node_slot == node_slot}
        table.add_row(f"stage {samples.stage_R[rank]}", *(f"{costs[f]:+.1%}" for f in slow))
    console.print(table)


def event_notes(events: Sequence[EventCost]) -> list[str]:
    """What happens only in some steps: in the days of training, and in no quantile of a step."""
    return [
        f"every {event.facts.every} steps{', assumed' if len(event.facts.numbers) == 1 else ''}: "
        f"{event.extra_ns / 1e6:,.3f} ms more; in the days of training, not in the step time"
        for event in events
        if event.rate
    ]


def print_notes(console: Console, notes: Sequence[str]) -> None:
    """What to know about the figures."""
    for note in notes:
        console.print(f"- {note}", markup=False)
