"""The scores of ``bench/vtrain_layouts.py``: who is scored, choices, and when bars are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prismscale.validation.rows import Row


@pytest.fixture
def bench(bench_module: Callable[[str], Any]) -> Any:
    """The bench as a module."""
    return bench_module("vtrain_layouts")


def iteration(bench: Any, *, gpus: int = 64, tensor: int = 1, time_ms: float) -> Any:
    """One published row."""
    return bench.Iteration(
        gpus=gpus,
        batch=512,
        micro_batch=1,
        hidden=1024,
        heads=16,
        layers=8,
        length=2048,
        tensor=tensor,
        data=gpus // tensor,
        stages=1,
        time_ms=time_ms,
    )


def step(bench: Any, one: Any, error: float) -> Row:
    """Its row."""
    return Row.told(f"{one.name}{bench.STEP}1 of 2 ms", error, "%")


def calibrated_step(bench: Any, one: Any, error: float) -> Row:
    """Its row after calibration."""
    return Row.told(f"{one.name}{bench.CALIBRATED_STEP}1 of 2 ms", error, "%")


def test_a_choice_loses_what_the_published_figures_say(bench: Any) -> None:
    """The shortest predicted step is taken, though another was shorter in fact."""
    best, other = (iteration(bench, tensor=t, time_ms=ms) for t, ms in ((1, 100.0), (2, 110.0)))
    rows = [step(bench, best, 20), step(bench, other, 0)]
    (choice,) = bench._choice(
        [best, other], {r.name.partition(bench.STEP)[0]: r.value for r in rows}
    )
    assert choice.value == pytest.approx(10)
    assert not choice.ok


def test_a_part_of_the_sample_has_no_bars(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the one that says how much of it was run."""
    drawn = [iteration(bench, tensor=t, time_ms=100) for t in (1, 2, 4)]
    monkeypatch.setattr(bench, "calibration", lambda drawn: drawn[:1])
    rows = list(bench.overall([step(bench, one, 1) for one in drawn[:2]], drawn))
    assert [row.name for row in rows if row.bar is not None] == ["rows of the sample that were run"]
    every = [step(bench, one, 1) for one in drawn]
    after = [calibrated_step(bench, one, 2) for one in drawn[1:]]
    part, whole = (list(bench.overall([*every, *rows], drawn)) for rows in (after[:1], after))
    assert sum(row.bar is not None for row in part) == 3
    assert sum(row.bar is not None for row in whole) == 4


def test_a_calibrated_row_is_scored_where_it_was_not_given(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that calibrate are in no figure."""
    drawn = [iteration(bench, tensor=t, time_ms=100) for t in (1, 2, 4)]
    monkeypatch.setattr(bench, "calibration", lambda drawn: drawn[:1])
    every = [step(bench, one, 30) for one in drawn]
    after = [calibrated_step(bench, one, e) for one, e in zip(drawn, (0, 4, 6), strict=True)]
    found = {row.name: row.value for row in bench.overall([*every, *after], drawn)}
    assert found["after 1 rows (2 rows): median error"] == pytest.approx(5)


def test_narrow_rows_of_one_gpu_a_replica_are_not_scored(bench: Any) -> None:
    """The host's constant rests on such rows; split ones and several nodes have no part in it."""
    assert not iteration(bench, gpus=8, time_ms=1).is_scored
    assert iteration(bench, gpus=8, tensor=2, time_ms=1).is_scored
    assert iteration(bench, time_ms=1).is_scored
