"""The questions of an engineer, answered from a run's figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from prismscale.analysis.answers import GroupTime, answers, meant
from prismscale.analysis.assertions import Assertion, Known, failures
from prismscale.analysis.emulated import KernelKind, UnknownOperator
from prismscale.analysis.job_work import JobWork
from prismscale.analysis.result import EventResult, RunResult, StepSpread
from prismscale.analysis.wanted import Price, Wanted
from prismscale.errors import UsageError
from prismscale.report.answer_rows import answer_rows, fit_row
from support.report_job import report_run

GIB = 2**30


@pytest.fixture(scope="module")
def result() -> RunResult:
    """A pipeline on GPUs of 80 GiB, whose work and spread are known."""
    found = report_run()[0]
    stages = [
        replace(stage, peak_bytes=8 * GIB, reserved_bytes=(10 + n) * GIB, fullest_rank=n)
        for n, stage in enumerate(found.stages)
    ]
    spread = StepSpread(
        p50_ns=3 * found.step_ns // 2,
        p95_ns=2 * found.step_ns,
        mean_ns=2 * found.step_ns,
        draws=200,
    )
    work = JobWork(flops=6e15, unmasked_flops=8e15, executed_flops=9e15, tokens=1 << 20)
    return replace(
        found,
        stages=tuple(stages),
        spread=spread,
        work=work,
        capacity_bytes=80 * GIB,
        peak_flops=1e15,
    )


def test_the_fullest_stage_decides_whether_it_fits(result: RunResult) -> None:
    """Reserved and outside memory of the fullest stage, against the GPU's."""
    fit = answers(result, Wanted()).fit

    assert fit is not None
    last = result.stages[-1]
    assert (fit.stage, fit.rank) == (last.name, last.fullest_rank)
    assert fit.held_bytes == (last.reserved_bytes or 0) + last.outside_bytes
    assert fit.fits
    small = answers(replace(result, capacity_bytes=5 * GIB), Wanted()).fit
    assert small is not None
    assert not small.fits
    assert small.headroom_bytes == 5 * GIB - small.held_bytes


def test_without_an_allocator_nothing_is_said_of_fitting() -> None:
    """A processor's memory has no verdict."""
    assert answers(report_run()[0], Wanted()).fit is None


def test_figures_follow_from_the_step(result: RunResult) -> None:
    """Tokens a second and utilisation are the median step's, GPU-hours and cost the mean one's."""
    found = answers(result, Wanted(price=Price.parse("2.5/h"), for_steps=10))

    second = 1.5 * result.step_ns / 1e9
    assert (found.step_ns, found.without_variation_ns) == (round(1e9 * second), result.step_ns)
    assert found.tokens_per_s == pytest.approx((1 << 20) / second)
    assert found.tokens_per_s_per_gpu == pytest.approx((1 << 20) / second / result.world_size)
    assert found.mfu == pytest.approx(6e15 / (1e15 * result.world_size * second))
    assert found.hfu == pytest.approx(1.5 * (found.mfu or 0))
    assert found.gpu_hours == pytest.approx(10 * 2e-9 * result.step_ns * result.world_size / 3600)
    assert found.cost == pytest.approx(2.5 * found.gpu_hours)


def test_what_falls_together_is_paid_for_once(result: RunResult) -> None:
    """An event that only comes with another has no share of training, and costs no hours."""
    with_other = EventResult(first=2, every=2, seen=3, extra_ns=999, share=0.0, site="train.py:7")
    # A third of training: half as long as the ordinary steps.
    evaluation = replace(with_other, extra_ns=result.step_ns, share=1 / 3)
    plain = answers(result, Wanted(for_steps=10)).gpu_hours
    eventful = replace(result, events=(with_other, evaluation))

    assert not with_other.is_notable
    assert plain is not None
    assert answers(eventful, Wanted(for_steps=10)).gpu_hours == pytest.approx(plain * 2.5 / 2)


def test_without_draws_the_step_is_that_of_the_simulation(result: RunResult) -> None:
    """And nothing is said of p50 and p95."""
    found = answers(replace(result, spread=None), Wanted())

    assert found.step_ns == result.step_ns
    asked = Assertion.parse("p50<1s")
    with pytest.raises(UsageError, match="does not find p50"):
        asked.failure(Known(fit=None, answers=found))


def test_given_tokens_go_before_found_ones(result: RunResult) -> None:
    """Where the program's shapes do not tell them, a user can."""
    found = answers(result, Wanted(tokens_per_step=1000))

    assert found.tokens_per_step == 1000
    assert found.tokens_given


@pytest.mark.parametrize(
    ("text", "per_hour", "currency"),
    [("2.5/h", 2.5, "$"), ("$2.5", 2.5, "$"), ("2 EUR/h", 2.0, "€"), ("€1.95/hour", 1.95, "€")],
)
def test_prices_as_people_write_them(text: str, per_hour: float, currency: str) -> None:
    """With or without a currency and the hour."""
    assert Price.parse(text) == Price(per_hour=per_hour, currency=currency)


@pytest.mark.parametrize("text", ["", "cheap", "-1/h", "2.5/min", "$2€"])
def test_what_is_no_price_is_refused(text: str) -> None:
    """With an example of one."""
    with pytest.raises(UsageError, match=r"2\.5/h"):
        Price.parse(text)


@pytest.mark.parametrize(
    "text",
    ["reserved<76GiB", "headroom>10GiB", "step<1000s", "hidden(pp)>=0", "mfu>0%", "bubble<100%"],
)
def test_conditions_that_hold(result: RunResult, text: str) -> None:
    """Of memory, time, shares and groups."""
    found = answers(result, Wanted())

    assert failures((Assertion.parse(text),), Known(fit=found.fit, answers=found)) == []


def test_a_condition_that_does_not_hold_shows_the_figure(result: RunResult) -> None:
    """In the unit that it was asked in."""
    found = answers(result, Wanted())
    asserted = (Assertion.parse("reserved<1GiB"), Assertion.parse("reserved>1GiB"))

    (failure,) = failures(asserted, Known(fit=found.fit, answers=found))

    assert failure == "reserved<1GiB: reserved is 13GiB"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("reserved=3", "give FIGURE<VALUE"),
        ("reservd<3GiB", "did you mean reserved"),
        ("reserved<3s", "allowed: B, KiB"),
        ("reserved(dp)<3GiB", "no such figure"),
        ("hidden>0.9", "no such figure"),
        ("step<1.2.3s", "not a number"),
    ],
)
def test_what_is_no_condition_is_refused(text: str, told: str) -> None:
    """With what is allowed."""
    with pytest.raises(UsageError, match=told):
        Assertion.parse(text)


def test_a_figure_that_is_not_known_is_no_failure_but_an_error(result: RunResult) -> None:
    """A check in CI must not pass because nobody looked."""
    with pytest.raises(UsageError, match="does not find step"):
        failures((Assertion.parse("step<1s"),), Known(fit=answers(result, Wanted()).fit))


def test_groups_are_meant_by_name_or_word() -> None:
    """``dp`` is ``mesh_dp``; an exact name goes first."""
    groups = tuple(GroupTime(name=n, exposed=0.0, hidden=None) for n in ("mesh_dp", "dp", "ep_dp"))

    assert [g.name for g in meant(groups, "dp")] == ["dp"]
    assert [g.name for g in meant(groups[::2], "dp")] == ["mesh_dp", "ep_dp"]
    assert meant(groups, "tp") == []


def test_memory_that_nobody_followed_is_unknown_not_none(result: RunResult) -> None:
    """On a GPU what lies outside torch's allocator has no figure."""
    fit = answers(result, Wanted()).fit
    assert fit is not None
    assert "unknown outside torch" in fit_row(replace(fit, outside_bytes=0)).detail
    assert "1.000 GiB outside torch" in fit_row(replace(fit, outside_bytes=GIB)).detail


def test_a_step_that_rests_on_unpriced_kernels_says_so_beside_it(result: RunResult) -> None:
    """From a tenth of the kernels' time on, with the operator that takes most of it."""
    known = KernelKind(kind="gemm", source="roofline", calls=8, device_ns=80)
    other = KernelKind(kind="unknown", source="default", calls=2, device_ns=20)
    unknown = UnknownOperator(op="mine::scan", calls=2, device_ns=20)
    found = replace(result, kernels=(known, other), unknown_operators=(unknown,))

    (row,) = (r for r in answer_rows(found, answers(found, Wanted())) if r.name == "Unpriced")

    assert row.answer.startswith("20.0 %")
    assert "mine::scan" in row.detail
    nearly_all = replace(found, kernels=(replace(known, device_ns=980), other))
    assert "Unpriced" not in {r.name for r in answer_rows(nearly_all, answers(found, Wanted()))}


def test_a_program_that_ran_out_with_room_left_is_not_said_to_hold_too_much(
    result: RunResult,
) -> None:
    """Its own limit stopped it, or it cannot use the room."""
    fit = answers(result, Wanted()).fit
    assert fit is not None
    row = fit_row(replace(fit, ran_out=True))
    assert row.is_bad
    assert row.answer.startswith("no, it ran out of memory, ")
    assert " free: " in row.answer


def test_the_page_answers_what_was_asked_of_the_run(result: RunResult) -> None:
    """By default; a command may ask for something else."""
    asked = replace(result, wanted=Wanted(price=Price(per_hour=2.0), tokens_per_step=10))
    assert answers(asked) == answers(result, asked.wanted)
    stored = json.loads(json.dumps(asked.to_json()))
    assert RunResult.from_json(stored).wanted == asked.wanted


def test_allocated_and_reserved_are_of_one_gpu(result: RunResult) -> None:
    """Another stage may hold larger tensors on a GPU that is less full."""
    first = replace(result.stages[0], peak_bytes=9 * GIB)
    fit = answers(replace(result, stages=(first, *result.stages[1:]))).fit
    assert fit is not None
    assert fit.allocated_bytes == 8 * GIB
