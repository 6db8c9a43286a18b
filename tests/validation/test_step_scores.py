"""Whole steps: what is scored, which bars are given, and what older prices predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prismscale.analysis.step_error import ErrorBar
from prismscale.cluster import Cluster
from prismscale.errors import FormatError
from prismscale.validation.rows import Row
from prismscale.validation.steps import step_scores
from prismscale.validation.steps.measured import TORCHTITAN, MeasuredStep, load_measured
from prismscale.validation.steps.other_answers import six_n_d_ms
from prismscale.validation.steps.price_version import price_version
from prismscale.validation.steps.recorded_step import Provenance, RecordedStep, recorded_steps
from prismscale.validation.steps.step_scores import ScoredStep, scored_steps


def measured(case: str, step_ms: float, *, gpus: int = 8, is_scored: bool = True) -> MeasuredStep:
    return MeasuredStep(
        family=TORCHTITAN,
        case=case,
        group="a group",
        step_ms=step_ms,
        gpus=gpus,
        gpu="h100-96g",
        dtype="BFloat16",
        parameters=8e9,
        tokens=gpus * 16384,
        is_scored=is_scored,
    )


def recorded(case: str, step_ms: float, **more: object) -> RecordedStep:
    return RecordedStep(family=TORCHTITAN, case=case, step_ms=step_ms, **more)


def pair(few_ms: float, many_ms: float) -> list[ScoredStep]:
    """Steps of 8 and 128 GPUs, published as 100 and 103 ms."""
    truth = [measured("8b-8", 100), measured("8b-128", 103, gpus=128)]
    return scored_steps(truth, [recorded("8b-8", few_ms), recorded("8b-128", many_ms)])


def change(steps: list[ScoredStep]) -> Row:
    """The row of what 128 GPUs lose."""
    return next(row for row in step_scores._torchtitan(steps) if "8 to 128 GPUs" in row.name)


def test_a_change_between_scales_is_compared_in_points() -> None:
    """Published 2.9 % fewer tokens; half a percent more is 3.4 points off."""
    assert change(pair(100, 103)).ok
    row = change(pair(100, 99.5))
    assert row.value == pytest.approx(3.4, abs=0.05)
    assert not row.ok


def test_a_step_that_was_looked_at_is_not_scored() -> None:
    """It stands in the row of all alone."""
    truth = [measured("a", 100), measured("b", 100, is_scored=False)]
    steps = scored_steps(truth, [recorded("a", 101), recorded("b", 150)])
    rows = {row.name: row.value for row in step_scores._simumax(steps)}
    assert rows["a group, without variation (1 steps): median error"] == pytest.approx(1)
    assert rows[
        "a group, without variation, all, seen ones too (2 steps): median error"
    ] == pytest.approx(25.5)


def test_the_median_and_the_step_without_variation_are_both_scored() -> None:
    """Against the same bars, where every step was drawn."""
    steps = [recorded("8b-8", 100, median_ms=101), recorded("8b-128", 100, median_ms=103)]
    truth = [measured("8b-8", 100), measured("8b-128", 103, gpus=128)]
    rows = list(step_scores._torchtitan(scored_steps(truth, steps)))
    at_128 = [(row.value, row.bar) for row in rows if row.name.startswith("torchtitan 8b-128")]
    assert at_128 == [(pytest.approx(0), 8), (pytest.approx(2.9, abs=0.05), 8)]
    kinds = [row.name.split(", ")[2].partition(":")[0] for row in rows if "128 GPUs," in row.name]
    assert kinds == ["p50", "without variation"]


def test_bars_are_on_the_whole_set_alone() -> None:
    """Four of 24 steps have no verdict, and what is lacking is a miss."""
    steps = scored_steps([measured("a", 100)], [recorded("a", 101)])
    bars = [row for row in step_scores._simumax(steps) if row.bar is not None]
    assert [(row.value, row.bar, row.ok) for row in bars] == [(1, 24, False)]


def test_an_error_bar_can_be_too_wide() -> None:
    """Bars that contain every step miss the upper bar, bars that contain none the lower one."""
    truth = [measured(str(n), 100) for n in range(4)]
    wide = [recorded(str(n), 110, bar=ErrorBar(below=0.1, above=0.01)) for n in range(4)]
    low, high, *_ = step_scores._covered(scored_steps(truth, wide))
    assert low.ok
    assert not high.ok
    narrow = [replace(step, bar=ErrorBar(below=0.09, above=0.3)) for step in wide]
    low, high, *_ = step_scores._covered(scored_steps(truth, narrow))
    assert not low.ok
    assert high.ok


def test_steps_of_other_prices_are_counted() -> None:
    """A recorded step that names today's prices is not stale."""
    prices = price_version(Cluster.load("h100-96g"), "h100-96g")
    truth = [measured("a", 100), measured("b", 100)]
    steps = scored_steps(truth, [recorded("a", 1, prices=prices), recorded("b", 1, prices="old")])
    (row,) = step_scores._stale(steps)
    assert row.value == 1
    assert not row.ok


def test_prices_differ_between_clusters() -> None:
    """Of kernels and of links."""
    h100 = Cluster.load("h100-sxm")
    slower = replace(h100, nics_per_node=4)
    versions = {
        price_version(h100, "h100-sxm"),
        price_version(h100, "b200"),
        price_version(slower, "h100-sxm"),
    }
    assert len(versions) == 3


@pytest.mark.parametrize("bar", [None, ErrorBar(below=0.125, above=1.375)])
def test_a_note_reads_back_equal(bar: ErrorBar | None) -> None:
    """With an error bar and without one."""
    by = Provenance(bar=bar, prices="1a2b3c4d", commit="abc1234-dirty")
    assert Provenance.parse(f"cause not found; {by.note()}") == by


def test_a_note_of_something_else_says_nothing() -> None:
    """None, not a guess."""
    assert Provenance.parse("prismscale abc1234") is None


def test_recorded_steps_are_those_of_the_benches() -> None:
    """Each family has some, and each has a length."""
    assert {step.family for step in recorded_steps()} >= {"simumax", "vtrain"}


def test_a_recorded_step_has_a_length() -> None:
    """A step of no time is refused."""
    with pytest.raises(FormatError, match="above 0"):
        recorded("a", 0)


def test_six_operations_a_parameter_and_token() -> None:
    """At 40 % of 989.4 TFLOP/s."""
    expected = 1000 * 6 * 8e9 * 16384 / (0.4 * 989.4e12)
    assert six_n_d_ms(measured("a", 1)) == pytest.approx(expected, rel=1e-3)


def test_missing_tables_are_named(tmp_path) -> None:
    """With the folder that was given."""
    with pytest.raises(FormatError, match="no public steps"):
        load_measured(tmp_path)
