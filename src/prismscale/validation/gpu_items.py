"""Items that ``prismscale validate gpu`` measures: each does runs and makes rows of them.

========  ==========================================================================================
run       the emulated program at world sizes 1, 8 and 1,024 with rank 0 live: step, lag, peak
overhead  the emulated and the plain program by turns: ratio of step times
memory    2 and 4 real processes on the one GPU against a live rank: peak bytes, equal to the byte
null      the plain program against the null device: peak bytes, how often operations are called,
          time of a step and of its kernels
release   how late streams go on that were held for 50 µs to 50 ms; without the user's program
========  ==========================================================================================
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from prismscale.errors import UsageError, did_you_mean
from prismscale.measure.gpu_figures import TRACED_STEPS, HeldFigures, PlainFigures
from prismscale.validation.gpu_runs import EmulatedFigures, GpuRuns, PredictedFigures
from prismscale.validation.rows import Row

WORLD_SIZES = (1, 8, 1024)
RANKS_OF_MEMORY = (2, 4)
PAIRS = 3
OVERHEAD_STEPS = 16
MEMORY_STEPS = 8
NULL_STEPS = 4
HIGHEST_OVERHEAD = 1.01
LARGEST_PEAK_ERROR = 0.005
LARGEST_RESERVED_ERROR = 0.03
LARGEST_STEP_ERROR = 0.06


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuItem:
    """One thing to measure."""

    runs: int
    """Number of runs that it takes, for the progress."""
    measure: Callable[[GpuRuns], list[Row]]


def chosen_items(names: str) -> dict[str, GpuItem]:
    """Return the items of a comma-separated list, in its order.

    Raises:
        UsageError: an item is unknown.
    """
    found = {}
    for name in (part.strip() for part in names.split(",")):
        if name not in ITEMS:
            raise UsageError(f"--items: {name!r} is no item; {did_you_mean(name, ITEMS)}")
        found[name] = ITEMS[name]
    return found


def measure_run(runs: GpuRuns) -> list[Row]:
    """Run the emulated program at several world sizes."""
    return run_rows({world_size: runs.emulated(world_size) for world_size in WORLD_SIZES})


def run_rows(found: Mapping[int, EmulatedFigures]) -> list[Row]:
    """Return the time and memory of the live rank, and the command's time, by world size."""
    rows = []
    for world_size, figures in found.items():
        live, name = figures.live, f"world {world_size:,}"
        rows += [
            Row.told(f"{name}: live step", live.median_step_ns / 1e6, "ms"),
            Row.told(f"{name}: predicted step", live.predicted_step_ns / 1e6, "ms"),
            Row.told(f"{name}: lag in a step", live.lag_ns / 1e6, "ms"),
            Row.told(f"{name}: peak allocated", live.peak_bytes / 2**30, "GiB"),
            Row.told(f"{name}: command", figures.command_s, "s"),
        ]
    return rows


def measure_overhead(runs: GpuRuns) -> list[Row]:
    """Run the plain and the emulated program by turns, so that drift of the machine is in both."""
    pairs = [(runs.plain(1, steps=OVERHEAD_STEPS)[0], runs.emulated(1)) for _ in range(PAIRS)]
    return overhead_rows(pairs)


def overhead_rows(pairs: Sequence[tuple[PlainFigures, EmulatedFigures]]) -> list[Row]:
    """Return the ratio of step times. Lag was taken out of them, and is added as a cost here."""
    ratios = [
        (emulated.live.median_step_ns + emulated.live.lag_ns) / plain.median_step_ns
        for plain, emulated in pairs
    ]
    name = "emulated over plain step, median of pairs"
    return [Row.at_most(name, statistics.median(ratios), HIGHEST_OVERHEAD)]


def measure_memory(runs: GpuRuns) -> list[Row]:
    """Run rank 0 among real ranks, and as the live rank in a world of the same size."""
    return memory_rows(
        {n: (runs.plain(n, steps=MEMORY_STEPS)[0], runs.emulated(n)) for n in RANKS_OF_MEMORY}
    )


def memory_rows(found: Mapping[int, tuple[PlainFigures, EmulatedFigures]]) -> list[Row]:
    """Compare peak bytes of the real and the live rank, by number of ranks."""
    rows = []
    for n_ranks, (plain, emulated) in found.items():
        for figure in ("peak_bytes", "reserved_bytes"):
            real, live = getattr(plain, figure), getattr(emulated.observed, figure)
            name = f"{n_ranks} ranks: "
            rows.append(Row.told(f"{name}real {figure}", real, "bytes"))
            rows.append(Row.at_most(f"{name}{figure}, difference", abs(live - real), 0, "bytes"))
    return rows


def measure_null(runs: GpuRuns) -> list[Row]:
    """Run the plain program on the GPU and on the null device."""
    (timed,) = runs.plain(1, steps=OVERHEAD_STEPS + TRACED_STEPS, trace=True)
    (counted,) = runs.plain(1, steps=NULL_STEPS, count=True)
    return null_rows(timed, counted, runs.on_null(steps=NULL_STEPS), runs.predicted())


def null_rows(
    timed: PlainFigures, counted: PlainFigures, null: PlainFigures, predicted: PredictedFigures
) -> list[Row]:
    """Compare peak bytes, steps and kernels, and list operations not called equally often.

    Memory is compared in the runs that count operations, because these have equally many steps. The
    kernels of the GPU are all that its profiler saw; those of the null device are all that it
    prices.
    """
    names = {*counted.operations, *null.operations}
    differing = [
        f"{name}: {counted.operations.get(name, 0)} times, on the null device "
        f"{null.operations.get(name, 0)}"
        for name in sorted(names)
        if counted.operations.get(name, 0) != null.operations.get(name, 0)
    ]
    operations = Row.at_most("operations called differently often", len(differing), 0)
    step_ns, kernel_ns = timed.median_step_ns, timed.kernel_ns_per_step
    return [
        *_beside("peak", null.peak_bytes, counted.peak_bytes, LARGEST_PEAK_ERROR, "bytes"),
        *_beside(
            "reserved", null.reserved_bytes, counted.reserved_bytes, LARGEST_RESERVED_ERROR, "bytes"
        ),
        replace(operations, note="; ".join(differing)),
        *_beside("step", predicted.step_ns / 1e6, step_ns / 1e6, LARGEST_STEP_ERROR, "ms"),
        *_beside("kernels of a step", predicted.kernel_ns / 1e6, kernel_ns / 1e6, None, "ms"),
        Row.told("kernels launched in a step", sum(timed.kernels.values()) / TRACED_STEPS),
    ]


def _beside(name: str, null: float, real: float, bar: float | None, unit: str) -> list[Row]:
    """Return both figures, and the relative error of the null device's figure."""
    off = null / real - 1
    error = f"{name}, null against real"
    return [
        Row.told(f"{name}, real", real, unit),
        Row.told(f"{name}, null", null, unit),
        Row.told(error, off) if bar is None else Row.at_most(error, abs(off), bar),
    ]


def measure_release(runs: GpuRuns) -> list[Row]:
    """Measure by CUDA events how long after the asked time a held stream goes on."""
    return release_rows(runs.held())


def release_rows(figures: HeldFigures) -> list[Row]:
    """Return the median and 90th percentile of the lateness, by asked time."""
    rows = []
    for asked_ns, late_us in zip(figures.asked_ns, figures.late_us, strict=True):
        ordered, name = sorted(late_us), f"asked {asked_ns / 1e3:,.0f} µs"
        ninetieth = ordered[len(ordered) * 9 // 10 - 1]
        rows.append(Row.told(f"{name}: late, median", statistics.median(ordered), "µs"))
        rows.append(Row.told(f"{name}: late, 90th of 100", ninetieth, "µs"))
    return rows


ITEMS = {
    "run": GpuItem(runs=len(WORLD_SIZES), measure=measure_run),
    "overhead": GpuItem(runs=2 * PAIRS, measure=measure_overhead),
    "memory": GpuItem(runs=2 * len(RANKS_OF_MEMORY), measure=measure_memory),
    "null": GpuItem(runs=4, measure=measure_null),
    "release": GpuItem(runs=1, measure=measure_release),
}
DEFAULT_ITEMS = ",".join(ITEMS)
