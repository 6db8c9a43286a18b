"""The error bar of a modelled step."""

from __future__ import annotations

from dataclasses import replace
from math import hypot

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.analysis.attribution import Breakdown
from prismscale.analysis.emulated import KernelKind
from prismscale.analysis.result import RunResult, StageResult
from prismscale.analysis.step_error import (
    COMMUNICATION_ERROR,
    HOST_FASTER,
    HOST_SLOWER,
    MOST_TOO_SHORT,
    UNKNOWN_ERROR,
    ErrorBar,
    step_error,
)
from prismscale.cluster import Calibration


def kind(name: str, device_ns: int, error: float) -> KernelKind:
    return KernelKind(kind=name, source="modelled", calls=1, device_ns=device_ns, error=error)


def job(
    *kernels: KernelKind, compute_ns: int = 100, exposed_ns: int = 0, host_ns: int = 0
) -> RunResult:
    """Of one rank, by what its step consists of."""
    parts = Breakdown(
        rank=0,
        step_ns=compute_ns + exposed_ns + host_ns + 50,
        compute_ns={"forward": compute_ns, "backward, host": host_ns},
        exposed_ns={"dp": exposed_ns},
        bubble_ns=50,
    )
    stage = StageResult(
        name="all ranks", ranks=1, first_rank=0, breakdown=parts, memory_source="none"
    )
    return RunResult(
        command="train.py",
        world_size=1,
        cluster="h100-sxm",
        device="null",
        step_ns=parts.step_ns,
        step_spread_ns=(parts.step_ns, parts.step_ns),
        sampled_steps=1,
        stages=(stage,),
        classes=(),
        live=(),
        sources=(),
        distinct_axes=(),
        witnesses=(),
        captured=(0,),
        samples=1,
        hangs=(),
        rank_nodes=1,
        kernels=kernels,
    )


def above(error: float) -> float:
    """What is predicted too short by ``error`` of the truth takes so much more than predicted."""
    return 1 / (1 - error) - 1


def bar(result: RunResult) -> ErrorBar:
    """Of a step that has one."""
    found = step_error(result)
    assert found is not None
    return found


@given(error=st.floats(1e-6, MOST_TOO_SHORT), measured=st.floats(1, 1e9))
def test_a_bar_holds_what_is_off_by_less_of_the_truth(error: float, measured: float) -> None:
    """An error is relative to what was measured, a bar to what is predicted."""
    found = ErrorBar.of_error(error)
    for off in (-0.999, 0, 0.999):
        assert found.holds(measured / (measured * (1 + off * error)))
    assert not found.holds((1 + found.above) * 1.001)
    assert not found.holds((1 - found.below) * 0.999)


def test_an_error_above_the_whole_is_of_predictions_that_are_too_long() -> None:
    """Nothing is too short by more than all of it."""
    assert ErrorBar.of_error(9).above == ErrorBar.of_error(MOST_TOO_SHORT).above == 1
    assert ErrorBar.of_error(9).below == pytest.approx(0.9)


def test_calls_of_one_kind_err_alike() -> None:
    """Two entries of a kind are one; waiting errs as the rest does."""
    found = bar(job(kind("gemm", 40, 0.2), kind("gemm", 60, 0.1)))
    assert found.above == pytest.approx(above(0.4 * 0.2 + 0.6 * 0.1))


def test_kinds_err_independently() -> None:
    """Their shares add up in squares."""
    found = bar(job(kind("gemm", 50, 0.2), kind("norm", 50, 0.2)))
    assert found.above == pytest.approx(hypot(0.5 * above(0.2), 0.5 * above(0.2)))
    assert found.below == pytest.approx(hypot(0.5, 0.5) * (1 - 1 / 1.2))


def test_communication_that_nothing_hides_has_its_error() -> None:
    """A step that is nothing but communication errs as communication does."""
    found = bar(job(kind("gemm", 1, 0.2), compute_ns=0, exposed_ns=100))
    assert found.above == pytest.approx(above(COMMUNICATION_ERROR))


def test_the_host_errs_by_more_than_kernels() -> None:
    """Where the device waits for it: its share of what works, in squares with the kernels'."""
    found = bar(job(kind("gemm", 1, 0.2), compute_ns=25, host_ns=75))
    assert found.above == pytest.approx(hypot(0.25 * above(0.2), 0.75 * HOST_SLOWER))
    assert found.below == pytest.approx(hypot(0.25 * (1 - 1 / 1.2), 0.75 * HOST_FASTER))


def test_a_host_that_nearly_keeps_the_device_waiting_counts() -> None:
    """At the pace of slower hosts launches take longer than the kernels: by what is more."""
    launched = replace(kind("gemm", 100, 0.2), host_ns=80)
    found = bar(job(launched, compute_ns=100))
    assert found.above == pytest.approx(hypot(above(0.2), 80 * (1 + HOST_SLOWER) / 100 - 1))
    assert found.below == pytest.approx(1 - 1 / 1.2)
    hidden = replace(kind("gemm", 100, 0.2), host_ns=40)
    assert bar(job(hidden, compute_ns=100)).above == pytest.approx(above(0.2))


def test_a_slower_host_makes_no_step_longer_than_itself_is_slower() -> None:
    """Launches that overlap with waiting for a stage take longer than the work of their own."""
    ahead = replace(kind("gemm", 100, 0.0), host_ns=300)
    assert bar(job(ahead, compute_ns=100)).above == pytest.approx(HOST_SLOWER)


def test_an_unknown_error_is_taken_for_a_large_one() -> None:
    """Not for none."""
    found, unknown = bar(job(kind("scan", 10, -1.0))), ErrorBar.of_error(UNKNOWN_ERROR)
    assert (found.below, found.above) == pytest.approx((unknown.below, unknown.above))


def test_a_measured_step_has_none() -> None:
    """Nor has one whose kernels nobody knows."""
    assert step_error(replace(job(kind("gemm", 10, 0.2)), device="cpu")) is None
    assert step_error(job()) is None


def test_measured_steps_say_how_far_the_host_may_be_off() -> None:
    """In place of what hosts differ by."""
    calibration = Calibration(host=2.0, host_error=0.2, steps=4)
    found = replace(job(kind("gemm", 1, 0.0), compute_ns=0, host_ns=100), calibration=calibration)
    assert bar(found).above == pytest.approx(0.2)
    assert bar(found).below == pytest.approx(1 - 1 / 1.2)
