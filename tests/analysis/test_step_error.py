"""The error bar of a modelled step."""

from __future__ import annotations

from dataclasses import replace
from math import hypot

import pytest

from prismscale.analysis.attribution import Breakdown
from prismscale.analysis.emulated import KernelKind
from prismscale.analysis.result import RunResult, StageResult
from prismscale.analysis.step_error import (
    COMMUNICATION_ERROR,
    HOST_ERROR,
    UNKNOWN_ERROR,
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


def test_calls_of_one_kind_err_alike() -> None:
    """Two entries of a kind add up; waiting errs as the rest does."""
    found = step_error(job(kind("gemm", 40, 0.2), kind("gemm", 60, 0.1)))
    assert found == pytest.approx(0.4 * 0.2 + 0.6 * 0.1)


def test_kinds_err_independently() -> None:
    """Their shares add up in squares."""
    found = step_error(job(kind("gemm", 50, 0.2), kind("norm", 50, 0.2)))
    assert found == pytest.approx(hypot(0.1, 0.1))


def test_communication_that_nothing_hides_has_its_error() -> None:
    """A step that is nothing but communication errs as communication does."""
    found = step_error(job(kind("gemm", 1, 0.2), compute_ns=0, exposed_ns=100))
    assert found == pytest.approx(COMMUNICATION_ERROR)


def test_the_host_errs_by_more_than_kernels() -> None:
    """Where the device waits for it: its share of what works, in squares with the kernels'."""
    found = step_error(job(kind("gemm", 1, 0.2), compute_ns=25, host_ns=75))
    assert found == pytest.approx(hypot(0.25 * 0.2, 0.75 * HOST_ERROR))


def test_a_host_that_nearly_keeps_the_device_waiting_counts() -> None:
    """At the pace of slower hosts launches take longer than the kernels: by what is more."""
    launched = replace(kind("gemm", 100, 0.2), host_ns=80)
    found = step_error(job(launched, compute_ns=100))
    assert found == pytest.approx(hypot(0.2, 80 * (1 + HOST_ERROR) / 100 - 1))
    hidden = replace(kind("gemm", 100, 0.2), host_ns=40)
    assert step_error(job(hidden, compute_ns=100)) == pytest.approx(0.2)


def test_an_unknown_error_is_taken_for_a_large_one() -> None:
    """Not for none."""
    assert step_error(job(kind("scan", 10, -1.0))) == pytest.approx(UNKNOWN_ERROR)


def test_a_measured_step_has_none() -> None:
    """Nor has one whose kernels nobody knows."""
    assert step_error(replace(job(kind("gemm", 10, 0.2)), device="cpu")) is None
    assert step_error(job()) is None


def test_measured_steps_say_how_far_the_host_may_be_off() -> None:
    """In place of what hosts differ by."""
    calibration = Calibration(host=2.0, host_error=0.2, steps=4)
    found = replace(job(kind("gemm", 1, 0.0), compute_ns=0, host_ns=100), calibration=calibration)
    assert step_error(found) == pytest.approx(0.2)
