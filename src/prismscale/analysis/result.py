"""The outcome of one run: what ``results.json`` holds. The schema is in ``docs/results.md``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from prismscale.analysis.attribution import Breakdown

SCHEMA = "prismscale.results/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """One pipeline stage, or all ranks where there is no pipeline."""

    name: str
    ranks: int
    first_rank: int
    breakdown: Breakdown
    peak_bytes: int | None
    memory_source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassResult:
    """One rank class: who is in it, and what was checked."""

    index: int
    stage: str
    ranks: int
    captured: tuple[int, ...]
    assumed: int
    nodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveResult:
    """What was observed of one live rank."""

    rank: int
    step_ns: tuple[int, ...]
    """Logical step times, in order."""
    median_step_ns: int
    predicted_step_ns: int
    waited_ns: int
    """Median time per step spent waiting for communication."""
    lag_ns: int
    """Median cost of emulation per step, taken out of ``step_ns``."""
    peak_bytes: int
    boot_s: float
    communications: int
    uncovered: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """How much of the step rests on one source of durations."""

    source: str
    share: float
    """Fraction of the step's time on the ranks shown, 0 … 1."""
    error: str
    """What is known about this source's error, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Everything one run found out."""

    command: str
    world_size: int
    cluster: str
    device: str
    step_ns: int
    """Predicted steady step time of the job."""
    step_spread_ns: tuple[int, int]
    """Shortest and longest predicted step of single steps, from the captured samples."""
    stages: tuple[StageResult, ...]
    classes: tuple[ClassResult, ...]
    live: tuple[LiveResult, ...]
    sources: tuple[SourceShare, ...]
    distinct_axes: tuple[str, ...]
    witnesses: tuple[int, ...]
    captured: tuple[int, ...]
    hangs: tuple[str, ...]
    rank_nodes: int
    wall_s: dict[str, float] = field(default_factory=dict)
    """By stage of the run."""
    peak_rss_bytes: int = 0
    """Highest memory of all our processes together, as sampled."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``results.json``."""
        return {"schema": SCHEMA, **asdict(self)}
