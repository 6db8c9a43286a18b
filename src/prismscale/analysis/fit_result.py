"""What ``prismscale fit`` finds: the memory of one rank of each pipeline stage, and the verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from prismscale.analysis.answers import MemoryFit
from prismscale.analysis.memory.memory_kinds import MemoryPeak
from prismscale.graph.trace import MemoryPart, MemoryRecord

SCHEMA = "prismscale.fit/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The rank of a stage that was captured."""

    name: str
    rank: int
    record: MemoryRecord
    peak: MemoryPeak
    steps: int
    """Of the program while its memory was followed. After one alone nothing says that the next does
    not need more."""

    @property
    def outside(self) -> tuple[MemoryPart, ...]:
        """What others than torch's allocator hold, largest first."""
        return self.record.outside

    @property
    def outside_bytes(self) -> int:
        """All of it."""
        return sum(part.n_bytes for part in self.outside)

    @property
    def held_bytes(self) -> int:
        """What the GPU must have."""
        return (self.record.reserved_bytes or 0) + self.outside_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """The program as it is, or with some changes."""

    change: str
    """As the user wrote it; empty: none."""
    stages: tuple[StageMemory, ...] = ()
    ran_out: str = ""
    """What the program said when the GPU's memory was not enough: its figures are those that it
    has on a GPU with more. Empty: it was enough."""
    refused: str = ""
    """Why there are no figures: the program, or prismscale, refused the change."""
    between: tuple[tuple[int, int], ...] = ()
    """First and last of each run of stages that were not captured. They are taken to be no fuller
    than the stage before, which has no fewer microbatches in flight; the one after it has no more
    parameters."""

    @property
    def fullest(self) -> StageMemory | None:
        """The stage whose GPU is fullest; None without figures."""
        return max(self.stages, key=lambda stage: stage.held_bytes, default=None)

    def fit(self, capacity_bytes: int) -> MemoryFit | None:
        """The verdict; None without figures."""
        stage = self.fullest
        if stage is None:
            return None
        return MemoryFit(
            capacity_bytes=capacity_bytes,
            reserved_bytes=stage.record.reserved_bytes or 0,
            allocated_bytes=stage.record.peak_bytes,
            outside_bytes=stage.outside_bytes,
            stage=stage.name,
            rank=stage.rank,
            ran_out=bool(self.ran_out),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """One ``prismscale fit``."""

    command: str
    world_size: int
    cluster: str
    capacity_bytes: int
    """Of the target's GPU."""
    variants: tuple[Variant, ...]
    """The first is the program as it is."""
    wall_s: float

    @property
    def given(self) -> Variant:
        """The program as it is."""
        return self.variants[0]

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the verdict on every variant."""
        data = {"schema": SCHEMA, **asdict(self)}
        for row, variant in zip(data["variants"], self.variants, strict=True):
            fit = variant.fit(self.capacity_bytes)
            row["fit"] = None if fit is None else fit.to_json()
        return data
