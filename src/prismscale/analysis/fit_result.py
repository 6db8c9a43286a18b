"""Result of ``prismscale fit``: memory of one rank per pipeline stage, and whether it fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from prismscale.analysis.answers import MemoryFit
from prismscale.analysis.memory.memory_kinds import MemoryPeak
from prismscale.graph.trace import MemoryPart, MemoryRecord

SCHEMA = "prismscale.fit/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Memory of the captured rank of one stage."""

    name: str
    rank: int
    record: MemoryRecord
    peak: MemoryPeak
    steps: int
    """Steps of the program during which memory was tracked. After a single step, the next one may
    still need more."""

    @property
    def outside(self) -> tuple[MemoryPart, ...]:
        """Memory outside torch's allocator, largest first."""
        return self.record.outside

    @property
    def outside_bytes(self) -> int:
        """Bytes of all parts of :attr:`outside`."""
        return sum(part.n_bytes for part in self.outside)

    @property
    def held_bytes(self) -> int:
        """Bytes that the GPU must have."""
        return (self.record.reserved_bytes or 0) + self.outside_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Result for the program as it is, or with some changes."""

    change: str
    """The change as the user wrote it; empty for none."""
    stages: tuple[StageMemory, ...] = ()
    ran_out: str = ""
    """The program's message when it ran out of memory. The figures are then those on a GPU with
    more. Empty where memory was enough."""
    refused: str = ""
    """Why there are no figures: the program, or prismscale, refused the change."""
    between: tuple[tuple[int, int], ...] = ()
    """First and last stage of each range that was not captured. These stages are assumed to be no
    fuller than the stage before the range: it has no fewer microbatches in flight, and the stage
    after the range has no more parameters than it."""

    @property
    def fullest(self) -> StageMemory | None:
        """The stage whose GPU is fullest; None without figures."""
        return max(self.stages, key=lambda stage: stage.held_bytes, default=None)

    def fit(self, capacity_bytes: int) -> MemoryFit | None:
        """Return the fit in memory of the fullest stage; None without figures."""
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
    """Result of one ``prismscale fit`` command."""

    command: str
    world_size: int
    cluster: str
    capacity_bytes: int
    """Memory of the target's GPU."""
    variants: tuple[Variant, ...]
    """The first is the program as it is."""
    wall_s: float

    @property
    def given(self) -> Variant:
        """The program as it is."""
        return self.variants[0]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with the fit of every variant."""
        data = {"schema": SCHEMA, **asdict(self)}
        for row, variant in zip(data["variants"], self.variants, strict=True):
            fit = variant.fit(self.capacity_bytes)
            row["fit"] = None if fit is None else fit.to_json()
        return data
