"""Whole steps of real programs against public measurements: ``prismscale validate steps``.

The programs run for minutes to hours, so their predictions are read as benches recorded them
(:mod:`prismscale.validation.steps.recorded_step`); errors are computed now, from the public tables.

A run shows its median step; what varies from step to step and from device to device is part of it,
as it is of what others measured. The step without variation is held against the same bars.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prismscale.validation.error_rows import Bars, error_rows, worst_first
from prismscale.validation.rows import Row
from prismscale.validation.steps.bridge_rows import RECIPES
from prismscale.validation.steps.measured import (
    BRIDGE,
    BRIDGE_GROUPS,
    GOLDEN,
    SIMUMAX,
    TORCHTITAN,
    VTRAIN,
    MeasuredStep,
    cluster_of_family,
    load_measured,
)
from prismscale.validation.steps.other_answers import SIX_N_D, six_n_d_ms
from prismscale.validation.steps.price_version import price_version
from prismscale.validation.steps.recorded_step import RecordedStep, recorded_steps

SIMUMAX_STEPS, SIMUMAX_BARS = 24, Bars(median=6, p90=12)
VTRAIN_STEPS, VTRAIN_BAR = 40, 8.0
BRIDGE_BARS = Bars(median=12)
TITAN_BAR, CHANGE_BAR = 8.0, 2.0
LEAST_COVERED, MOST_COVERED = 80.0, 95.0
CHANGES = (("eager", ""), ("compiled", "-compiled"))
"""Of torchtitan's runs on 8 and 128 GPUs: name, and how the cases end."""
P50, STEADY = "p50", "without variation"
"""What a run shows as its step, and the same with every device and link alike."""
NO_SPREAD = (
    "on 128 GPUs the slowest of more devices, and longer links, decide; the published steps have "
    "that, and a step without variation has not"
)
TOO_WIDE = (
    "p90 of kinds of kernels that benchmarks show, calls of one kind erring alike: the products of "
    "one program err in both directions"
)
REMARKS = (
    "Steps are of real programs on the null device, which run for minutes to hours: "
    "bench/simumax_records.py, null_programs.py, vtrain_layouts.py, bridge_steps.py and "
    "megatron_golden_steps.py recorded them, with the commit that predicted them (bench/results). "
    "Errors, and what others say, are computed by this command.",
    "Megatron-Bridge's recipes were listed before a result was seen: all whose sizes are those "
    "of the newest published row, rows with experts of the newest software alone (NeMo 26.06). "
    "Their programs are those of a row's container: its release of Megatron-Bridge, with its "
    "Megatron-LM, torch, Transformer Engine and environment; GPT-OSS, Nemotron 3 Super and Qwen3 "
    "30B on GB300 are older records of commit 067f987's. "
    "No B300 or GB300 was measured: they are known by their data sheets.",
    "6·N·D: six operations for each parameter and token, at 40 % of the peak, whatever the "
    "program. Parameters are those that a token goes through.",
    "Megatron-LM's tests are its functional tests on 8 H100, each by the code, options and "
    "Transformer Engine of the commit that brought its times. Their models are small: the host "
    "decides most of them. Its time for an operator was fitted on the GPTs, which are not scored; "
    "that was settled before a step was predicted. One model with one layout differs by 1.5 times "
    "between the values of two commits, so no constant can meet all.",
    "p50 is the step that a run shows; it stands where a bench recorded it of the whole set.",
    "Not scored: SimuMax's runs whose steps were looked at while constants of the B200 moved, "
    "vTrain's rows beside which the host's time was set before it was fitted on H100s, and "
    "Nemotron 3 Super's recipe in MXFP8 on GB200, beside which a slower host was looked for on a "
    "Grace CPU (its time for an operator is of another source, and a lower bound), and Qwen3 30B's "
    "on GB300, which showed that kernels of several streams take turns (no constant is of it). The "
    "B200's share of its bandwidth for elementwise kernels is SimuMax's stated figure.",
    "Megatron-Bridge 0.5.1 (NeMo 26.06) names two regressions of its own: recipes with both tensor "
    "and expert parallelism may be slower since NCCL 2.30, which no longer binds the program to "
    "its GPU's cores (Nemotron 3 Super on GB200), and GPT-OSS in MXFP8 on GB200 and GB300. Their "
    "rows are scored as they are.",
    "vTrain's rows on one node: Megatron's layers take the same time there whatever their work,"
    " because the host decides (bench/vtrain_layouts.py).",
    "A step's error bar is composed of the errors of its kinds of kernels, of the host's launches "
    "and of communication (analysis/step_error.py), and counted over scored rows that recorded it. "
    "What the host is off by is of rows that are not scored. That it counts as the host's own "
    "time, and that a bar has two ends, was settled when it was known which steps lay outside: 71 "
    "and 66 % were inside before.",
    "Prices are eight letters of what the models say of a few hundred calls. A step that other "
    "prices than today's predicted is stale.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredStep:
    """A measured step and its prediction."""

    measured: MeasuredStep
    recorded: RecordedStep
    kind: str = STEADY
    """Of the predicted step: :data:`P50` or :data:`STEADY`."""

    @property
    def predicted_ms(self) -> float:
        """As the run has it."""
        return self.recorded.median_ms if self.kind == P50 else self.recorded.step_ms

    @property
    def error_percent(self) -> float:
        """Predicted over measured less one."""
        return 100 * (self.predicted_ms / self.measured.step_ms - 1)

    @property
    def is_covered(self) -> bool:
        """Whether the truth lies within the error bar."""
        bar = self.recorded.bar
        return bar is not None and bar.holds(self.measured.step_ms / self.predicted_ms)


def validate(truth: Path) -> list[Row]:
    """All rows, those that miss their bar by the most first.

    Raises:
        FormatError: a table is missing or damaged.
    """
    steps = scored_steps(load_measured(truth), recorded_steps())
    return worst_first(
        [
            *_simumax(_of(steps, SIMUMAX)),
            *_torchtitan(_of(steps, TORCHTITAN)),
            *_vtrain(_of(steps, VTRAIN)),
            *_bridge(_of(steps, BRIDGE)),
            *_golden(_of(steps, GOLDEN)),
            *_covered(steps),
            *_stale(steps),
        ]
    )


def scored_steps(
    measured: Sequence[MeasuredStep], recorded: Sequence[RecordedStep]
) -> list[ScoredStep]:
    """Those that were both measured and predicted, in the order of the predictions."""
    by_case = {(step.family, step.case): step for step in measured}
    return [
        ScoredStep(measured=by_case[step.family, step.case], recorded=step)
        for step in recorded
        if (step.family, step.case) in by_case
    ]


def _kinds(steps: Sequence[ScoredStep]) -> Iterator[list[ScoredStep]]:
    """The steps by either kind of prediction; those of :data:`P50` where all have it."""
    if not steps:
        return
    if all(step.recorded.median_ms for step in steps):
        yield [replace(step, kind=P50) for step in steps]
    yield [replace(step, kind=STEADY) for step in steps]


def _of(steps: Sequence[ScoredStep], family: str) -> list[ScoredStep]:
    return [step for step in steps if step.measured.family == family]


def _simumax(steps: Sequence[ScoredStep]) -> Iterator[Row]:
    is_whole = len(steps) == SIMUMAX_STEPS
    for predicted in _kinds(steps):
        scored = [step for step in predicted if step.measured.is_scored]
        yield from _group_rows(scored, SIMUMAX_BARS if is_whole else Bars())
        if len(steps) > len(scored):
            yield from _group_rows(predicted, Bars(), mark=", all, seen ones too")
    yield replace(
        Row.at_least("SimuMax's runs by a recorded step", len(steps), SIMUMAX_STEPS),
        note="a minute and more of a core each",
    )


def _torchtitan(steps: Sequence[ScoredStep]) -> Iterator[Row]:
    for predicted in _kinds(steps):
        yield from _group_rows(predicted, Bars())
        for step in predicted:
            name = f"torchtitan {step.measured.case}, {step.kind}: size of the step's error"
            row = Row.at_most(name, abs(step.error_percent), TITAN_BAR, "%")
            yield replace(row, others={who: abs(e[0]) for who, e in _by_thumb([step]).items()})
        by_case = {step.measured.case: step for step in predicted}
        for name, ending in CHANGES:
            pair = [by_case.get(f"8b-{gpus}{ending}") for gpus in (8, 128)]
            if pair[0] and pair[1]:
                yield _change(name, pair[0], pair[1])


def _change(name: str, few: ScoredStep, many: ScoredStep) -> Row:
    """How much less a GPU does among 128 than among 8: ours less what was published, in points."""
    published = 100 * (few.measured.step_ms / many.measured.step_ms - 1)
    ours = 100 * (few.predicted_ms / many.predicted_ms - 1)
    row = Row.at_most(
        f"torchtitan {name}, 8 to 128 GPUs, {few.kind}: {ours:+.1f} %, published "
        f"{published:+.1f} %, apart by",
        abs(ours - published),
        CHANGE_BAR,
        "points",
    )
    is_known = few.kind == STEADY and not row.ok
    return replace(row, note=NO_SPREAD) if is_known else row


def _vtrain(steps: Sequence[ScoredStep]) -> Iterator[Row]:
    bars = Bars(median=VTRAIN_BAR) if len(steps) >= VTRAIN_STEPS else Bars()
    for predicted in _kinds(steps):
        scored = [step for step in predicted if step.measured.is_scored]
        for group in dict.fromkeys(step.measured.group for step in scored):
            yield from _group_rows([s for s in scored if s.measured.group == group], Bars())
        errors = [step.error_percent for step in scored]
        name = f"Megatron-LM on A100s (vTrain), uncalibrated, {predicted[0].kind}"
        yield from error_rows(name, errors, bars, of="steps", others=_by_thumb(scored))
    yield replace(
        Row.at_least("vTrain's sampled rows by a recorded step", len(steps), VTRAIN_STEPS),
        note="2 to 17 minutes of a core each",
    )


def _bridge(steps: Sequence[ScoredStep]) -> Iterator[Row]:
    for is_dense, group in BRIDGE_GROUPS.items():
        of_group = [step for step in steps if step.measured.group == group]
        recipes = sum(recipe.is_dense == is_dense for recipe in RECIPES)
        bars = BRIDGE_BARS if len(of_group) == recipes else Bars()
        for predicted in _kinds(of_group):
            scored = [step for step in predicted if step.measured.is_scored]
            yield from _group_rows(scored, bars)
            if len(predicted) > len(scored):
                yield from _group_rows(predicted, Bars(), mark=", all, seen ones too")
            for step in predicted:
                name = f"Megatron-Bridge, {step.measured.case}, {step.kind}: step's error"
                yield Row.told(name, step.error_percent, "%")
        # Each takes 3 to 60 minutes of a core.
        yield Row.told(f"{group}: recorded steps, of {recipes} that are listed", len(of_group))


def _golden(steps: Sequence[ScoredStep]) -> Iterator[Row]:
    groups = dict.fromkeys(step.measured.group for step in steps)
    for predicted in _kinds(steps):
        for group in groups:
            of_group = [step for step in predicted if step.measured.group == group]
            mark = "" if of_group[0].measured.is_scored else ", to fit, not scored"
            yield from _group_rows(of_group, Bars(), mark=mark)


def _group_rows(steps: Sequence[ScoredStep], bars: Bars, *, mark: str = "") -> Iterator[Row]:
    if not steps:
        return
    name = f"{steps[0].measured.group}, {steps[0].kind}{mark}"
    yield from error_rows(
        name, [s.error_percent for s in steps], bars, of="steps", others=_by_thumb(steps)
    )


def _by_thumb(steps: Sequence[ScoredStep]) -> dict[str, list[float]]:
    """Errors of others' answers, by who they are; none where a step's parameters are not known."""
    if not all(step.measured.parameters for step in steps):
        return {}
    return {
        SIX_N_D: [100 * (six_n_d_ms(s.measured) / s.measured.step_ms - 1) for s in steps],
    }


def _covered(steps: Sequence[ScoredStep]) -> Iterator[Row]:
    told = [s for s in steps if s.measured.is_scored and s.recorded.bar]
    bars = [step.recorded.bar for step in told if step.recorded.bar]
    if not told:
        return
    shown = [replace(s, kind=P50) if s.recorded.median_ms else s for s in told]
    for kind, predicted in (("as run shows them", shown), (STEADY, told)):
        share = 100 * sum(step.is_covered for step in predicted) / len(told)
        name = f"steps {kind} within their stated error bar ({len(told)} steps)"
        yield Row.at_least(name, share, LEAST_COVERED, "%")
        most = Row.at_most(f"{name}, not to be too wide", share, MOST_COVERED, "%")
        yield most if most.ok else replace(most, note=TOO_WIDE)
    for side, ends in (("below", [b.below for b in bars]), ("above", [b.above for b in bars])):
        name = f"a step's error bar ends {side} it, median"
        yield Row.told(name, 100 * float(np.median(ends)), "%")


def _stale(steps: Sequence[ScoredStep]) -> Iterator[Row]:
    now = {
        (s.measured.family, s.measured.gpu): price_version(
            cluster_of_family(s.measured.family, s.measured.gpu), s.measured.gpu
        )
        for s in steps
    }
    for (family, gpu), prices in now.items():
        of_gpu = [s for s in _of(steps, family) if s.measured.gpu == gpu]
        stale = sum(s.recorded.prices != prices for s in of_gpu)
        yield Row.at_most(
            f"{family}: steps by other prices than today's ({gpu} {prices})", stale, 0
        )
