"""What measured steps say of the models' times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismscale.analysis.step_error import HOST_SLOWER
from prismscale.forecast.step_calibration import (
    KERNELS_ERROR,
    MOST_MODELLED,
    MeasuredJob,
    calibrate_steps,
)

MS = 1_000_000


def step(device_ms: float, host_ms: float, measured_ms: float) -> MeasuredJob:
    """A job whose step is the longer of what its kernels and their launches take."""
    return MeasuredJob(
        measured_ns=measured_ms * MS,
        model=lambda kernels, host: max(device_ms * kernels, host_ms * host) * MS,
    )


@given(kernels=st.floats(0.93, 1.07), host=st.floats(0.6, 3.0))
def test_both_factors_are_found(kernels: float, host: float) -> None:
    """Of jobs that either of them decides, whatever they are: where the device decides as modelled
    and the host in truth, too."""
    jobs = [(100, 80), (50, 90), (900, 30), (2_000, 60)]
    steps = [step(d, h, max(d * kernels, h * host)) for d, h in jobs]
    found = calibrate_steps(steps)
    assert found.calibration.kernels == pytest.approx(kernels, rel=0.02)
    assert found.calibration.host == pytest.approx(host, rel=0.05)


def test_a_wide_job_says_nothing_of_the_host() -> None:
    """The host's factor and its error are what they were, and it is told that no step tells."""
    found = calibrate_steps([step(1_000, 100, 1_050)])
    assert found.calibration.kernels == pytest.approx(1.035, abs=0.01)
    assert found.calibration.host == 1.0
    assert found.calibration.host_error == pytest.approx(HOST_SLOWER, rel=1e-3)
    assert not found.tells_host


def test_a_narrow_job_says_nothing_of_kernels() -> None:
    """The host takes all of the difference."""
    found = calibrate_steps([step(50, 100, 180)])
    assert found.calibration.kernels == 1.0
    assert found.calibration.host == pytest.approx(1.8, rel=0.02)
    assert found.kernels_error == pytest.approx(KERNELS_ERROR, rel=1e-3)
    assert found.tells_host


def test_more_steps_say_more() -> None:
    """Errors of both factors fall with each."""
    few, many = ([step(50, 100, 150), step(1_000, 100, 1_030)] * n for n in (1, 4))
    one, four = calibrate_steps(few), calibrate_steps(many)
    assert four.calibration.host_error < one.calibration.host_error
    assert four.kernels_error < 0.7 * one.kernels_error


def test_a_step_that_nothing_explains_counts_less() -> None:
    """Four agree, one took twice as long: the factor stays with the four, and is less certain."""
    agreed = [step(1_000 + n, 10, 1_030 + n) for n in range(4)]
    alone, beside = calibrate_steps(agreed), calibrate_steps([*agreed, step(1_000, 10, 2_000)])
    apart = math.log(beside.calibration.kernels / alone.calibration.kernels)
    assert 0 < apart < math.log(2) / 5 / 2
    assert beside.kernels_error > alone.kernels_error


def test_a_model_is_asked_a_bounded_number_of_times() -> None:
    """Each answer is a simulation."""
    asked: list[None] = []
    calibrate_steps([step(100, 80, 170)], lambda: asked.append(None))
    assert 0 < len(asked) <= MOST_MODELLED
