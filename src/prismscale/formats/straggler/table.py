"""The operations of a straggler trace as arrays, and the repairs that were made to the trace.

Array axes: ``T`` steps, ``D`` data-parallel ranks, ``K`` operations of one stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, order=True, slots=True)
class OpKey:
    """One operation of a stage's step: its type, and its number among those of that type."""

    label: str
    sequence: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTable:
    """When every operation of one stage started and ended, on the clock of its step."""

    stage: int
    keys: tuple[OpKey, ...]
    microbatch_K: NDArray[np.int32]
    """-1 where the operation belongs to no microbatch."""
    start_ns_TDK: NDArray[np.int64]
    end_ns_TDK: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTable:
    """A whole trace: every step has every operation of every worker exactly once."""

    step_ids: tuple[int, ...]
    n_replicas: int
    stages: tuple[StageTable, ...]

    @property
    def n_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages)

    @property
    def origin_ns_T(self) -> NDArray[np.int64]:
        """When each step starts: the first start of any operation."""
        starts = [s.start_ns_TDK.min(axis=(1, 2)) for s in self.stages]
        return np.asarray(np.min(starts, axis=0), dtype=np.int64)

    @property
    def step_ns_T(self) -> NDArray[np.int64]:
        """Observed step times: last end minus first start over all workers."""
        ends = [s.end_ns_TDK.max(axis=(1, 2)) for s in self.stages]
        return np.asarray(np.max(ends, axis=0), dtype=np.int64) - self.origin_ns_T

    def select(self, rows: NDArray[np.int64]) -> OpTable:
        """Return the trace with only the steps at these indices."""
        return OpTable(
            step_ids=tuple(self.step_ids[i] for i in rows.tolist()),
            n_replicas=self.n_replicas,
            stages=tuple(
                replace(s, start_ns_TDK=s.start_ns_TDK[rows], end_ns_TDK=s.end_ns_TDK[rows])
                for s in self.stages
            ),
        )


@dataclass(kw_only=True, slots=True)
class Repairs:
    """What was wrong with a trace, and what was done about it."""

    duplicate_rows: int = 0
    """Number of rows that repeat another one exactly: dropped."""
    skipped_steps: dict[int, str] = field(default_factory=dict)
    """Steps left out, and why."""
    trimmed: int = 0
    """Number of operations that overlap the one before: they begin at its end instead."""
    trimmed_most_ns: int = 0
    """Longest of these overlaps."""
    early_ends: int = 0
    """Number of communications that a member left before the last one arrived: taken as 0 long."""

    def skip(self, steps: Iterable[int], why: str) -> None:
        """Leave steps out; the first reason given for a step is kept."""
        for step in steps:
            self.skipped_steps.setdefault(int(step), why)

    def sentences(self) -> list[str]:
        """Return messages for the user; empty where nothing was wrong."""
        out = []
        if self.duplicate_rows:
            out.append(f"{self.duplicate_rows} repeated rows dropped")
        out += [f"step {step} left out: {why}" for step, why in sorted(self.skipped_steps.items())]
        if self.trimmed:
            out.append(
                f"{self.trimmed} operations overlap the one before, by at most "
                f"{self.trimmed_most_ns / 1e6:.3f} ms: begun at its end"
            )
        if self.early_ends:
            out.append(
                f"{self.early_ends} communications end for a member before the last one arrives: "
                "taken as 0 long"
            )
        return out
