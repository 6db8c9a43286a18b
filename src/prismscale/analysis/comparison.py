"""Compares runs: time by cause, memory, communication, kernels.

Times are those of the mean rank, with stages weighted by their number of ranks. The parts of each
stage's step add up to the step, so differences of parts add up to the difference of the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from prismscale.analysis.result import RunResult, StageResult


class Measure(Enum):
    """The unit of a figure."""

    TIME = "ns"
    BYTES = "bytes"
    COUNT = "count"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedFigure:
    """One figure, with its value in every run."""

    name: str
    measure: Measure
    values: tuple[float | None, ...]
    """One value per run; None where a run has no such figure."""

    @property
    def differences(self) -> tuple[float | None, ...]:
        """For every run but the first: its value minus that of the first run."""
        first = self.values[0]
        return tuple(
            None if first is None or value is None else value - first for value in self.values[1:]
        )

    @property
    def largest(self) -> float:
        """The largest absolute difference."""
        return max((abs(d) for d in self.differences if d is not None), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedPart:
    """A titled section of figures that belong together."""

    title: str
    note: str
    figures: tuple[ComparedFigure, ...]
    adds_up: bool = False
    """Whether the figures are parts of one whole."""


def compare(results: Sequence[RunResult]) -> list[ComparedPart]:
    """Compare runs, with parts in reading order. A run that hangs has no step time."""
    return [
        part
        for part in (_headline(results), _time(results), _kernels(results), _memory(results))
        if part.figures
    ]


def _headline(results: Sequence[RunResult]) -> ComparedPart:
    figures = (
        _figure("step (p50)", Measure.TIME, results, lambda r: None if r.hung else r.median_ns),
        _figure(
            "without variation", Measure.TIME, results, lambda r: None if r.hung else r.step_ns
        ),
        _figure("ranks", Measure.COUNT, results, lambda r: r.world_size),
        _figure("rank classes", Measure.COUNT, results, lambda r: len(r.classes)),
        _figure("nodes of a step, all ranks", Measure.COUNT, results, lambda r: r.rank_nodes),
    )
    return ComparedPart(title="Runs", note="", figures=figures)


def _time(results: Sequence[RunResult]) -> ComparedPart:
    tables = [_parts_of(result) for result in results]
    names = dict.fromkeys(name for table in tables for name in table)
    figures = tuple(
        ComparedFigure(
            name=name,
            measure=Measure.TIME,
            values=tuple(table.get(name, 0.0) for table in tables),
        )
        for name in names
    )
    ordered = tuple(sorted(figures, key=lambda figure: -figure.largest))
    note = (
        "Where a step of the mean rank without variation goes; differences add up to that of its "
        "step."
    )
    return ComparedPart(title="Time by cause", note=note, figures=ordered, adds_up=True)


def _parts_of(result: RunResult) -> dict[str, float]:
    """Return nanoseconds of the mean rank by part of the step."""
    found: dict[str, float] = {}
    ranks = sum(stage.ranks for stage in result.stages) or 1
    for stage in result.stages:
        for name, ns in _of_stage(stage).items():
            found[name] = found.get(name, 0.0) + ns * stage.ranks / ranks
    return found


def _of_stage(stage: StageResult) -> dict[str, float]:
    own = stage.breakdown
    return {
        **{f"computation, {name}": float(ns) for name, ns in own.compute_ns.items()},
        **{f"exposed communication, {name}": float(ns) for name, ns in own.exposed_ns.items()},
        "bubble": float(own.bubble_ns),
        "skew": float(own.skew_ns),
    }


def _kernels(results: Sequence[RunResult]) -> ComparedPart:
    """Compare kernel time per captured rank, because runs capture different numbers of ranks."""
    tables: list[Mapping[str, float]] = []
    for result in results:
        table: dict[str, float] = {}
        for kind in result.kernels:
            per_rank = kind.device_ns / max(len(result.captured), 1)
            table[kind.kind] = table.get(kind.kind, 0.0) + per_rank
        tables.append(table)
    figures = [
        ComparedFigure(
            name=name,
            measure=Measure.TIME,
            values=tuple(table.get(name, 0.0) for table in tables),
        )
        for name in dict.fromkeys(name for table in tables for name in table)
    ]
    ordered = tuple(sorted(figures, key=lambda figure: -figure.largest))
    note = "Device time of a step by kind of kernel, mean of the captured ranks."
    return ComparedPart(title="Kernels", note=note, figures=ordered, adds_up=True)


def _memory(results: Sequence[RunResult]) -> ComparedPart:
    def of_fullest(name: str, of: Callable[[StageResult], int | None]) -> ComparedFigure:
        return _figure(name, Measure.BYTES, results, lambda r: of(r.fullest) if r.fullest else None)

    figures = (
        of_fullest("peak allocated", lambda stage: stage.peak_bytes),
        of_fullest("peak reserved", lambda stage: stage.reserved_bytes),
        of_fullest("outside torch", lambda stage: stage.outside_bytes or None),
    )
    known = tuple(f for f in figures if any(value is not None for value in f.values))
    return ComparedPart(title="Memory", note="Of the fullest GPU.", figures=known)


def _figure(
    name: str,
    measure: Measure,
    results: Sequence[RunResult],
    of: Callable[[RunResult], float | None],
) -> ComparedFigure:
    return ComparedFigure(name=name, measure=measure, values=tuple(of(r) for r in results))
