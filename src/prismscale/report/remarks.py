"""Conclusions from a result for the reports: totals over ranks, and sentences for the reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prismscale.analysis.attribution import Breakdown
from prismscale.analysis.moved import Moved
from prismscale.analysis.payload_use import MIRRORED, PayloadKind
from prismscale.analysis.result import EventResult, LiveResult, RunResult
from prismscale.report.kernels import coverage_sentence, eager_sentence
from prismscale.report.units import counted, duration, percent, signed_percent, size, span
from prismscale.sim.steady import MOST_STEPS

FEW_SAMPLES = 3
FEW_STEPS = 5
SETTLED = 0.005
FAR_OFF = 0.05
MOST_HANGS = 6
MOST_PARTS = 3
"""Most parts of the memory outside torch's allocator that are named one by one."""
MOST_VALUES = 4
COVERED = 0.99


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a step."""

    name: str
    kind: str
    """``computation``, ``communication`` or ``waiting``."""
    ns: float


def parts_of(breakdown: Breakdown) -> list[Part]:
    """Return the parts of one rank's step: computation, exposed communication, waiting."""
    compute, exposed = breakdown.compute_ns, breakdown.exposed_ns
    return [
        *(Part(name=n, kind="computation", ns=v) for n, v in compute.items()),
        *(Part(name=n, kind="communication", ns=v) for n, v in exposed.items()),
        Part(name="skew", kind="waiting", ns=breakdown.skew_ns),
        Part(name="bubble", kind="waiting", ns=breakdown.bubble_ns),
    ]


PHASES = ("forward", "backward", "optimizer")


def part_names(result: RunResult) -> list[tuple[str, str]]:
    """Return ``(kind, name)`` of every part that a stage has: phases, groups, waiting."""
    compute = _seen(s.breakdown.compute_ns for s in result.stages)
    exposed = _seen(s.breakdown.exposed_ns for s in result.stages)
    phases = [p for p in PHASES if p in compute] + [n for n in compute if n not in PHASES]
    waiting = [("waiting", "skew"), ("waiting", "bubble")]
    return [
        *(("computation", n) for n in phases),
        *(("communication", n) for n in sorted(exposed)),
        *waiting,
    ]


def _seen(tables: Iterable[Mapping[str, int]]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name, ns in table.items() if ns))


def job_shares(result: RunResult) -> dict[str, float]:
    """Return fractions of the step by kind, over all ranks.

    Waiting is split into ``bubble`` and ``skew``. Waiting for the host's launches is part of
    ``computation``."""
    whole = sum(s.ranks * s.breakdown.step_ns for s in result.stages)
    found = dict.fromkeys(("computation", "communication", "bubble", "skew"), 0.0)
    if whole == 0:
        return found
    for stage in result.stages:
        for part in parts_of(stage.breakdown):
            key = part.name if part.kind == "waiting" else part.kind
            found[key] += stage.ranks * part.ns / whole
    return found


def live_peak(live: LiveResult) -> str:
    """Return the peak memory of a live rank as text."""
    return size(live.peak_bytes) if live.peak_bytes else "not tracked"


def highest_peak_bytes(result: RunResult) -> int | None:
    """Return the highest memory peak of any stage; None if none was tracked."""
    return max((s.peak_bytes for s in result.stages if s.peak_bytes is not None), default=None)


def outside_sentence(result: RunResult) -> str:
    """Name the parts of memory outside torch on the stage with most of it; empty if unknown."""
    stage = max(result.stages, key=lambda s: s.outside_bytes, default=None)
    if stage is None or not stage.outside:
        return ""
    named = [f"{part.name} {size(part.n_bytes)}" for part in stage.outside[:MOST_PARTS]]
    left = stage.outside[MOST_PARTS:]
    if left:
        rest = counted(len(left), "other")
        named.append(f"{rest} {size(sum(part.n_bytes for part in left))}")
    return f"Outside torch, by assumed sizes of buffers: {', '.join(named)}."


def difference(live: LiveResult) -> float | None:
    """Return (observed - predicted) / predicted; None without an observed step."""
    if not live.step_ns or not live.predicted_step_ns:
        return None
    return live.median_step_ns / live.predicted_step_ns - 1


def class_sentences(result: RunResult) -> list[str]:
    """State how the rank classes were found: what was captured, checked and assumed."""
    assumed, checked = sum(c.assumed for c in result.classes), len(result.witnesses)
    axes = ", ".join(result.distinct_axes)
    stand = "stands" if len(result.classes) == 1 else "stand"
    classes = counted(len(result.classes), "class", "classes")
    sentences = [
        f"{classes} {stand} for {counted(result.world_size, 'rank')}.",
        f"Programs differ along {axes}." if axes else "No two programs were found to differ.",
        f"Captured: {counted(len(result.captured), 'rank')}.",
    ]
    if result.switched is not None:
        slots = counted(result.switched.slots, "slot")
        switches = counted(result.switched.switches, "switch", "switches")
        budget = result.switched.budget_bytes
        presses = counted(result.switched.presses, "time")
        within = f", memory pressed out {presses} to stay within {size(budget)}" if budget else ""
        sentences.append(f"All ran with real values, in {slots}: {switches}{within}.")
    if checked:
        sentences.append(f"Witnesses among them, found equal to their class: {checked:,}.")
    if result.checked:
        share = percent(len(result.checked) / result.world_size)
        sentences.append(
            f"{len(result.checked):,} of {counted(result.world_size, 'rank')} ({share}) were "
            "checked in their first steps."
        )
    if assumed:
        sentences.append(f"Assumed equal, not captured: {counted(assumed, 'rank')}.")
    return sentences


def router_sentences(result: RunResult) -> list[str]:
    """State how uneven the load of experts is, by Megatron-LM's measures, and what was mocked."""
    factors, mocked = result.routers.factors, result.routers.mocked
    sentences = []
    if factors is not None:
        steps = counted(factors.steps, "step")
        sentences.append(
            f"Overload of the fullest of {factors.ranks} ranks with {factors.experts} experts, in "
            f"{steps}: avg {factors.avg:.2f}, max {factors.max:.2f}, max_cum {factors.max_cum:.2f} "
            "(1 is an equal share)."
        )
    if mocked:
        times, lines = sum(m.times for m in mocked), ", ".join(m.site for m in mocked)
        sentences.append(
            f"Scores were overwritten as --routing says, {counted(times, 'time')}, at {lines}."
        )
    return sentences


def event_name(event: EventResult) -> str:
    """Return in a few words when the event happens."""
    if not event.every:
        return f"in step {event.first}, once"
    assumed = ", assumed" if event.seen == 1 else ""
    return f"every {counted(event.every, 'step')}{assumed}"


def event_source(event: EventResult) -> str:
    """Return what is known of an event: the checkpoint it writes, and where it communicates."""
    written = f"checkpoint, {size(event.checkpoint_bytes)} a rank" if event.checkpoint_bytes else ""
    return ", ".join(part for part in (written, event.site) if part) or "–"


def variability_sentence(result: RunResult) -> str:
    """State that parts of the step leave out variation; empty without a variability profile."""
    if not result.variability or result.hung:
        return ""
    return (
        "Shares and parts are of the step without variation; prismscale forecast tells what moves "
        f"it, by profile '{result.variability}'."
    )


def watched_sentence(result: RunResult) -> str:
    """State how many steps were seen, and that rarer events are in no figure."""
    if not result.watched_steps:
        return ""
    return (
        f"{counted(result.watched_steps, 'step')} were seen; what a program does less often is in "
        "no figure."
    )


def warnings_of(result: RunResult) -> list[str]:
    """Return the warnings that a reader must know before believing the figures, worst first."""
    found = [*_hang_warnings(result), *_what_if_warnings(result), *_live_warnings(result)]
    low, high = result.step_spread_ns
    if not (result.hung or result.varies or result.settled_after):
        found.append(
            f"Simulated steps still differ ({span(low, high)}) after {MOST_STEPS}: the job did not "
            "settle, and the step time is the mean of the later half."
        )
    found += [f"Not costed, {sentence}" for sentence in result.unmatched_events]
    if result.samples < FEW_SAMPLES and not result.kernels:
        found.append(
            f"Computation rests on {counted(result.samples, 'captured step')} only; measure more "
            "with --samples."
        )
    if result.kernel_coverage < COVERED:
        found.append(coverage_sentence(result))
    if result.eager_regions:
        found.append(eager_sentence(result))
    if result.payload is PayloadKind.MIRROR:
        found.append(MIRRORED)
    untracked = [s.name for s in result.stages if s.peak_bytes is None]
    if untracked:
        where = "" if len(untracked) == len(result.stages) else f" of {', '.join(untracked)}"
        found.append(f"The memory{where} was not tracked.")
    return found


def _hang_warnings(result: RunResult) -> list[str]:
    found = [f"Hang: {sentence}" for sentence in result.hangs[:MOST_HANGS]]
    left = len(result.hangs) - len(found)
    if left > 0:
        found.append(
            f"… and {counted(left, 'more group')} that {'waits' if left == 1 else 'wait'}."
        )
    return found


def _what_if_warnings(result: RunResult) -> list[str]:
    if result.step_without_ns is None:
        return []
    without = duration(result.step_without_ns)
    found = [
        f"What if {effect.text}: {effect.touches}, {percent(effect.share)} of the step."
        for effect in result.what_ifs
    ]
    by = ""
    if result.step_without_ns and not result.hung:
        by = f", {signed_percent(result.step_ns / result.step_without_ns - 1)}"
    listed = " Kernels are listed as captured." if result.kernels else ""
    return [*found, f"Without the step takes {without}{by} with it.{listed}"]


def _live_warnings(result: RunResult) -> list[str]:
    found = []
    for live in result.live:
        who, off = f"Live rank {live.rank}", difference(live)
        if off is None:
            found.append(f"{who} ended no steady step.")
            continue
        if abs(off) > FAR_OFF:
            found.append(f"{who} was {signed_percent(off)} off the prediction.")
        if len(live.step_ns) < FEW_STEPS:
            steps = counted(len(live.step_ns), "step")
            found.append(f"{who} was observed for {steps} only; run more with --steps.")
        if live.lag_ns > FAR_OFF * live.median_step_ns:
            share = percent(live.lag_ns / live.median_step_ns)
            found.append(
                f"{who}: the emulation cost {share} of a step, which was taken out of its times."
            )
        if live.uncovered:
            calls = counted(live.uncovered, "communication")
            found.append(
                f"{who} made {calls} that its capture did not; the collective model alone answered."
            )
    return found


_SOURCES = {
    PayloadKind.RULES: "rule",
    PayloadKind.RECORDED: "what captured ranks sent",
    PayloadKind.MIRROR: "what the rank itself does",
}


def payload_rows(result: RunResult) -> list[tuple[str, str]]:
    """Return the sources of the values of absent peers, each with its number of communications."""
    rows = []
    for use in result.payloads:
        rule = f" '{use.name}' ({use.where})" if use.name else ""
        rows.append((f"{_SOURCES[use.kind]}{rule}", f"{use.communications:,}"))
    return rows


def payload_sentences(result: RunResult) -> list[str]:
    """Return one line for each row of :func:`payload_rows`."""
    rows = zip(payload_rows(result), result.payloads, strict=True)
    return [f"{name}: {counted(use.communications, 'communication')}" for (name, _), use in rows]


def transfer_rows(result: RunResult) -> list[tuple[str, str]]:
    """Return what each live rank really sent and received; ranks without messages are left out."""
    return [
        (f"rank {live.rank}", _moved(live.moved)) for live in result.live if live.moved.messages
    ]


def _moved(moved: Moved) -> str:
    made = moved.communications - moved.defined
    values = "all with real values" if not made else f"{made:,} of them with made-up values"
    return (
        f"sent {size(moved.sent_bytes)} and received {size(moved.received_bytes)} in "
        f"{counted(moved.messages, 'message')} of {counted(moved.communications, 'communication')},"
        f" {values}"
    )


def value_sentences(result: RunResult) -> list[str]:
    """State which made-up values the program read, and where."""
    total = sum(v.count for v in result.values)
    lines = [f"{counted(total, 'read')} of values that do not exist, answered by policy:"]
    lines += [
        f"{v.count:,} × {v.answer} to {v.op} at {v.call_site}" for v in result.values[:MOST_VALUES]
    ]
    left = len(result.values) - MOST_VALUES
    return (
        [*lines, f"and at {counted(left, 'more place')}, see results.json"] if left > 0 else lines
    )
