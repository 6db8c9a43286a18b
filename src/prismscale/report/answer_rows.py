"""The first screen of a run: each question with its answer, in words.

The terminal, the HTML report and Markdown show the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prismscale.analysis.answers import Answers, GroupTime, MemoryFit
from prismscale.analysis.known_errors import KnownError, known_error, known_step_error
from prismscale.analysis.result import RunResult
from prismscale.report.remarks import job_shares
from prismscale.report.units import counted, digits, duration, percent, size, span

MOST_GROUPS = 3
SEEN = 0.0005
"""Share of the step below which waiting is not mentioned."""
LAUNCH_BOUND = 0.02
"""Share of the step from which on the row about devices waiting for the host is shown."""
UNPRICED = 0.1
"""Share of the kernels' time from which on the row about kernels without a rule is shown."""
_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class AnswerRow(NamedTuple):
    """One question with its answer."""

    name: str
    answer: str
    """The main figure."""
    detail: str = ""
    is_bad: bool = False


def answer_rows(result: RunResult, found: Answers) -> list[AnswerRow]:
    """Return the rows, in the order in which people ask."""
    return list(_rows(result, found))


def _rows(result: RunResult, found: Answers) -> Iterator[AnswerRow]:
    if found.fit is not None:
        yield fit_row(found.fit)
    yield _step_row(result, found)
    if 1 - result.kernel_coverage >= UNPRICED:
        yield _unpriced_row(result)
    if found.tokens_per_s is not None and found.tokens_per_s_per_gpu is not None:
        source = "given" if found.tokens_given else "a step"
        yield AnswerRow(
            "Tokens/s",
            f"{large(found.tokens_per_s)}, {found.tokens_per_s_per_gpu:,.0f} a GPU",
            f"{found.tokens_per_step:,} {source}",
        )
    if row := _utilisation_row(found):
        yield row
    yield _communication_row(result, found)
    if found.host >= LAUNCH_BOUND:
        yield _host_row(result, found)
    shares = job_shares(result)
    if found.bubble + shares["skew"] >= SEEN:
        yield AnswerRow(
            "Waiting",
            f"bubble {percent(found.bubble)} of the step",
            f"and {percent(shares['skew'])} for the slowest of a group",
        )
    yield _cost_row(found)
    yield _error_row(result, found)


def headroom(fit: MemoryFit) -> str:
    """Return how much of the GPU's memory is left, or is missing."""
    word = "free" if fit.headroom_bytes >= 0 else "too much"
    return f"{size(abs(fit.headroom_bytes))} {word}"


def fit_row(fit: MemoryFit) -> AnswerRow:
    """Return the row that says whether the job fits, and by how much."""
    verdict = "yes" if fit.fits else "no"
    ended = "it ran out of memory, " if fit.ran_out else ""
    where = f"rank {fit.rank}" + ("" if fit.stage == "all ranks" else f", {fit.stage}")
    # On a real GPU, memory outside torch's allocator is not tracked.
    outside = size(fit.outside_bytes) if fit.outside_bytes else "unknown"
    return AnswerRow(
        "Fits",
        f"{verdict}, {ended}{headroom(fit)}: {size(fit.held_bytes)} of "
        f"{size(fit.capacity_bytes)} on {where}",
        f"{size(fit.reserved_bytes)} reserved (allocated {size(fit.allocated_bytes)}), "
        f"{outside} outside torch",
        is_bad=not fit.fits,
    )


def _step_row(result: RunResult, found: Answers) -> AnswerRow:
    spread = result.spread
    if spread is None:
        low, high = result.step_spread_ns
        return AnswerRow("Step", duration(found.step_ns), span(low, high) if low != high else "")
    how = f", profile '{result.variability}'" if result.variability else ""
    return AnswerRow(
        "Step",
        f"{duration(found.step_ns)} (p50), p95 {duration(spread.p95_ns)}",
        f"of {spread.draws:,} draws{how}; {duration(found.without_variation_ns)} without variation",
    )


def _unpriced_row(result: RunResult) -> AnswerRow:
    """Return the row that says that the step rests on kernels whose cost is not known."""
    longest = result.unknown_operators[0].op if result.unknown_operators else "kernels"
    return AnswerRow(
        "Unpriced",
        f"{percent(1 - result.kernel_coverage)} of the kernels' time has no rule of cost",
        f"{longest} most: costed by the bytes of its arguments, which may be far off; give times "
        "with --kernels",
        is_bad=True,
    )


def _utilisation_row(found: Answers) -> AnswerRow | None:
    named = (("MFU", found.mfu), ("HFU", found.hfu))
    shares = [f"{name} {percent(share)}" for name, share in named if share is not None]
    if not shares:
        return None
    answer = ", ".join(shares)
    if found.mfu is None or found.mfu_unmasked is None:
        return AnswerRow("Utilisation", answer, "the program does not tell forward from backward")
    return AnswerRow(
        "Utilisation",
        answer,
        f"MFU as Megatron-LM counts; {percent(found.mfu_unmasked)} as torchtitan does, masked "
        "attention too",
    )


def _communication_row(result: RunResult, found: Answers) -> AnswerRow:
    exposed = job_shares(result)["communication"]
    groups = [_group(group) for group in found.groups[:MOST_GROUPS]]
    left = len(found.groups) - MOST_GROUPS
    if left > 0:
        groups.append(f"{counted(left, 'more group')}")
    return AnswerRow("Exposed", f"communication {percent(exposed)} of the step", ", ".join(groups))


def _host_row(result: RunResult, found: Answers) -> AnswerRow:
    pace = "an assumed pace: hosts differ by a factor of two"
    if result.calibration:
        pace = f"the pace of {counted(result.calibration.steps, 'measured step')}"
    return AnswerRow(
        "Host",
        f"decides {percent(found.host)} of the step: the GPU waits for launches",
        f"at {pace}; CUDA graphs, torch.compile or larger microbatches hide it",
    )


def _group(group: GroupTime) -> str:
    hidden = "" if group.hidden is None else f" ({percent(group.hidden)} hidden)"
    return f"{group.name} {percent(group.exposed)}{hidden}"


def _cost_row(found: Answers) -> AnswerRow:
    hours = f"{digits(found.gpu_hours)} GPU-hours"
    steps = f"{found.for_steps:,} steps"
    if found.cost is None:
        return AnswerRow(steps, hours, "with --price 2.5/h what they cost")
    return AnswerRow(steps, f"{hours}, {found.currency}{found.cost:,.2f}")


def _error_row(result: RunResult, found: Answers) -> AnswerRow:
    if result.device != "null":
        return AnswerRow("Error", "see Durations below", "and docs/accuracy.md")
    step = known_step_error(found.host, result.cluster)
    memory = [known_error(name, result.cluster) for name in ("allocated", "reserved")]
    told = [_of_runs(known) for known in memory if known is not None and found.fit is not None]
    measured = _of_runs(step) if step else "of the step unknown on this cluster"
    if result.calibration:
        measured = f"step calibrated by {counted(result.calibration.steps, 'measured one')}"
    if found.step_error is None:
        return AnswerRow("Error", measured, "; ".join(told))
    below, above = percent(found.step_error.below), percent(found.step_error.above)
    bar = f"step -{below} to +{above} in nine of ten, by its kernels, launches and links"
    return AnswerRow("Error", bar, "; ".join([measured, *told]))


def _of_runs(known: KnownError) -> str:
    return (
        f"{known.figure} {percent(known.median)} (worst {percent(known.worst)}) in "
        f"{counted(known.cases, 'measured run')}"
    )


def large(value: float) -> str:
    """Format a large number: ``1.234 M``."""
    scale, letter = next(((s, n) for s, n in _LARGE if value >= s), (1.0, ""))
    return f"{digits(value / scale)} {letter}".strip()
