"""Items of ``prismscale validate gpu``: which are chosen, and the rows of figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prismscale.analysis.observation import Observation
from prismscale.analysis.result import LiveResult
from prismscale.emulation.script import Script
from prismscale.errors import UsageError
from prismscale.measure.gpu_figures import TRACED_STEPS, HeldFigures, PlainFigures
from prismscale.validation.gpu_items import (
    DEFAULT_ITEMS,
    ITEMS,
    chosen_items,
    memory_rows,
    null_rows,
    overhead_rows,
    release_rows,
    run_rows,
)
from prismscale.validation.gpu_runs import EmulatedFigures, GpuRuns, PredictedFigures
from prismscale.validation.rows import Row

MS = 1_000_000


def plain(
    step_ms: float = 100, peak: int = 1000, reserved: int = 2000, **operations: int
) -> PlainFigures:
    """A rank that ran 16 steps, the first ones slow."""
    return PlainFigures(
        step_ns=(*[900 * MS] * 4, *[round(step_ms * MS)] * 11, *[800 * MS] * TRACED_STEPS),
        peak_bytes=peak,
        reserved_bytes=reserved,
        operations=operations,
        kernels={"gemm": 3 * TRACED_STEPS},
        kernel_ns={"gemm": 95 * MS * TRACED_STEPS},
    )


def emulated(
    step_ms: float = 100, lag_ms: float = 0, peak: int = 1000, reserved: int = 2000
) -> EmulatedFigures:
    """A run with rank 0 live."""
    live = LiveResult(
        rank=0,
        step_ns=(round(step_ms * MS),),
        median_step_ns=round(step_ms * MS),
        predicted_step_ns=99 * MS,
        waited_ns=0,
        lag_ns=round(lag_ms * MS),
        peak_bytes=3 << 30,
        boot_s=1.0,
        communications=1,
        uncovered=0,
    )
    observed = Observation(
        rank=0,
        step_end_ns=(1,),
        step_wait_ns=(0,),
        step_lag_ns=(0,),
        boot_s=1.0,
        communications=1,
        uncovered=0,
        peak_bytes=peak,
        reserved_bytes=reserved,
    )
    return EmulatedFigures(live=live, observed=observed, command_s=12.5)


def predicted(step_ms: float = 100, peak: int = 1000) -> PredictedFigures:
    """What a run on the null device says."""
    return PredictedFigures(
        step_ns=round(step_ms * MS), kernel_ns=90 * MS, peak_bytes=peak, reserved_bytes=2000
    )


def values(rows: list[Row]) -> dict[str, float]:
    return {row.name: row.value for row in rows}


def missed(rows: list[Row]) -> list[str]:
    return [row.name for row in rows if not row.ok]


@dataclass(kw_only=True)
class RecordedRuns(GpuRuns):
    """Answers what was recorded, and counts as real runs do."""

    seen: list[tuple[int, int]] = field(default_factory=list)

    def emulated(self, world_size: int) -> EmulatedFigures:
        self._count()
        return emulated()

    def plain(
        self, n_ranks: int, *, steps: int, count: bool = False, trace: bool = False
    ) -> list[PlainFigures]:
        self._count()
        return [plain()] * n_ranks

    def on_null(self, *, steps: int) -> PlainFigures:
        self._count()
        return plain()

    def predicted(self) -> PredictedFigures:
        self._count()
        return predicted()

    def held(self) -> HeldFigures:
        self._count()
        return HeldFigures(asked_ns=(50_000,), late_us=((1.0, 2.0),))


@pytest.mark.parametrize("name", ITEMS)
def test_progress_of_an_item_comes_to_its_end(name: str, tmp_path: Path) -> None:
    """Each run is one of those that were announced, and what equals itself misses no bar."""
    script = Script(target="train", is_module=True)
    runs = RecordedRuns(script=script, scratch=tmp_path, logs=tmp_path, cluster="h100-sxm")
    runs.total = ITEMS[name].runs
    runs.update = lambda done, total: runs.seen.append((done, total))
    rows = ITEMS[name].measure(runs)
    assert rows
    assert missed(rows) == []
    assert runs.seen == [(n + 1, ITEMS[name].runs) for n in range(ITEMS[name].runs)]


def test_items_come_in_the_order_of_the_list() -> None:
    """Spaces do not matter; all but null are the default."""
    assert list(chosen_items("release, run")) == ["release", "run"]
    assert list(chosen_items(DEFAULT_ITEMS)) == list(ITEMS)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("run,memmory", "'memmory' is no item; allowed: .*did you mean memory"),
        ("", "'' is no item; allowed: memory, null, overhead, release, run"),
    ],
)
def test_items_that_cannot_be_measured_are_refused(names: str, said: str) -> None:
    """Before anything runs."""
    with pytest.raises(UsageError, match=said):
        chosen_items(names)


def test_rows_of_run_tell_what_a_live_rank_saw() -> None:
    """By world size, in units that people read; nothing has a bar."""
    rows = run_rows({8: emulated(step_ms=100, lag_ms=2), 1024: emulated()})
    found = values(rows)
    assert found["world 8: live step"] == 100
    assert found["world 8: predicted step"] == 99
    assert found["world 8: lag in a step"] == 2
    assert found["world 8: peak allocated"] == 3
    assert found["world 1,024: command"] == 12.5
    assert all(row.bar is None for row in rows)


def test_overhead_is_the_median_of_pairs_after_the_first_steps() -> None:
    """Lag is part of what emulation costs; the slow first plain steps are not in it."""
    pairs = [
        (plain(step_ms=100), emulated(step_ms=100, lag_ms=0.5)),
        (plain(step_ms=200), emulated(step_ms=240)),
        (plain(step_ms=100), emulated(step_ms=99)),
    ]
    (row,) = overhead_rows(pairs)
    assert row.value == pytest.approx(1.005)
    assert row.ok
    (row,) = overhead_rows(pairs[1:2])
    assert (row.value, row.ok) == (pytest.approx(1.2), False)


def test_memory_must_be_equal_to_the_byte() -> None:
    """Allocated and reserved, each with its own verdict."""
    found = {
        2: (plain(peak=1000, reserved=2000), emulated(peak=1000, reserved=2000)),
        4: (plain(peak=1000, reserved=2000), emulated(peak=1000, reserved=1999)),
    }
    rows = memory_rows(found)
    assert values(rows)["2 ranks: real peak_bytes"] == 1000
    assert values(rows)["4 ranks: reserved_bytes, difference"] == 1
    assert missed(rows) == ["4 ranks: reserved_bytes, difference"]


def test_null_counts_operations_that_differ() -> None:
    """An operation that only one of both calls differs, too."""
    real, null = plain(peak=1000, add=3, mul=2), plain(peak=1004, add=3, mul=1, view=1)
    rows = null_rows(real, real, null, predicted())
    assert values(rows)["peak, null against real"] == pytest.approx(0.004)
    assert values(rows)["operations called differently often"] == 2
    assert missed(rows) == ["operations called differently often"]


def test_null_compares_steps_without_the_first_and_the_traced_ones() -> None:
    """Kernels are those of one step."""
    rows = null_rows(plain(step_ms=100), plain(), plain(), predicted(step_ms=107))
    assert values(rows)["step, real"] == 100
    assert values(rows)["kernels of a step, real"] == 95
    assert values(rows)["kernels of a step, null"] == 90
    assert values(rows)["kernels launched in a step"] == 3
    assert missed(rows) == ["step, null against real"]


def test_release_tells_median_and_ninetieth() -> None:
    """Of a hundred, in whichever order they came."""
    late_us = tuple(float(n) for n in reversed(range(1, 101)))
    rows = release_rows(HeldFigures(asked_ns=(50_000, 10_000_000), late_us=(late_us, late_us)))
    found = values(rows)
    assert found["asked 50 µs: late, median"] == 50.5
    assert found["asked 10,000 µs: late, 90th of 100"] == 90
