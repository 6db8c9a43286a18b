"""The arithmetic of ``bench/fidelity_gloo.py``: steps of jobs, their ratios, and the interval."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def bench(bench_module: Callable[[str], Any]) -> Any:
    """The bench as a module."""
    return bench_module("fidelity_gloo")


def test_a_real_step_ends_with_the_last_of_its_ranks(bench: Any) -> None:
    """Whichever rank that is; the next turn begins together again."""
    steps_RS = np.array([[10.0, 30, 10, 10, 5, 5, 5, 5], [20.0, 10, 20, 10, 4, 4, 4, 9]])
    assert bench._of_one_job(steps_RS).tolist() == [[20, 20, 10, 10, 5, 5, 5, 6]]


def test_every_job_is_compared_with_every_real_job_step_by_step(bench: Any) -> None:
    """A row for each turn, in per cent; a step only with the same step."""
    steps_JS = np.array([[110.0] * 4 + [200.0] * 4])
    real_JS = np.array([[100.0] * 8, [200.0] * 8])
    assert bench.ratios(steps_JS, real_JS) == pytest.approx(
        np.array([[10.0] * 4 + [-45.0] * 4, [100.0] * 4 + [0.0] * 4])
    )


def test_jobs_that_are_alike_differ_by_nothing_in_the_median(bench: Any) -> None:
    """However their steps are distributed, each against the other."""
    steps_JS = np.random.default_rng(1).lognormal(sigma=0.3, size=(2, 4000))
    median, low, high = bench.median_of_turns(bench.ratios(steps_JS[:1], steps_JS[1:]))
    assert low < 0 < high
    assert abs(median) < 2.5


def test_the_interval_counts_turns_not_steps(bench: Any) -> None:
    """Steps of a turn that are all alike say no more than one of them."""
    turns_T1 = np.random.default_rng(2).normal(size=(60, 1))
    single = bench.median_of_turns(turns_T1)
    assert bench.median_of_turns(np.repeat(turns_T1, 8, axis=1)) == pytest.approx(single, abs=0.05)
