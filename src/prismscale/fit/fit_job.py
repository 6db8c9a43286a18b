"""Runs ``prismscale fit``: captures a program's stages until their memory has settled."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from prismscale.analysis.fit_result import FitResult, StageMemory, Variant
from prismscale.analysis.memory.memory_kinds import PARAMETERS, MemoryPeak, memory_peak
from prismscale.analysis.memory.memory_log import load_memory_log, memory_path
from prismscale.capture.launcher import CaptureRunner
from prismscale.cluster import Cluster
from prismscale.config import JobConfig
from prismscale.devices.null.build import build_extension, is_built
from prismscale.errors import PrismscaleError, ScriptError, UsageError
from prismscale.fit.stage_ranks import captured_positions, columns_of, end_stages
from prismscale.fit.variants import Change
from prismscale.graph.trace import MemoryRecord
from prismscale.job_parts import capture_runner, fork_server
from prismscale.processes.variables import variables_set
from prismscale.progress import Reporter
from prismscale.runfolder import RunFolder

_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory", re.IGNORECASE)
LARGER = 16
"""Factor on the GPU's memory for a program that ran out of it, to see how much it needs."""


@dataclass(frozen=True, kw_only=True)
class FitJob:
    """One ``prismscale fit``."""

    config: JobConfig
    changes: tuple[Change, ...]
    folder: RunFolder
    reporter: Reporter

    def run(self) -> FitResult:
        """Capture the stages of every variant.

        Raises:
            PrismscaleError: the unchanged program cannot be captured.
        """
        began = time.monotonic()
        cluster = self.config.load_cluster()
        if not is_built():
            # Compile here, where progress is shown. A rank would compile unseen, into a log.
            with self.reporter.stage("compile") as update:
                build_extension()
                update(1, 1)
        variants = [self._variant(Change(), cluster)]
        for change in self.changes:
            try:
                variants.append(self._variant(change, cluster))
            except PrismscaleError as error:
                said = error.said if isinstance(error, ScriptError) else ""
                reason = (said or str(error)).strip().splitlines() or [type(error).__name__]
                variants.append(Variant(change=change.text, refused=reason[-1 if said else 0]))
        return FitResult(
            command=self.config.script.command,
            world_size=self.config.world_size,
            cluster=cluster.name,
            capacity_bytes=cluster.device.memory_bytes,
            variants=tuple(variants),
            wall_s=time.monotonic() - began,
        )

    def _variant(self, change: Change, cluster: Cluster) -> Variant:
        config = replace(self.config, script=change.of(self.config.script))
        with variables_set(change.environment):
            try:
                return self._captured(config, change, cluster)
            except ScriptError as error:
                if not _OUT_OF_MEMORY.search(error.said or str(error)):
                    raise
                larger = replace(cluster.device, memory_bytes=LARGER * cluster.device.memory_bytes)
                found = self._captured(config, change, replace(cluster, device=larger))
                return replace(found, ran_out=error.said)

    def _captured(self, config: JobConfig, change: Change, cluster: Cluster) -> Variant:
        folder = self.folder.captures(_key(config, change, cluster)).absolute()
        logs = self.folder.logs
        with (
            fork_server(config, logs) as starter,
            self.reporter.stage(f"fit {change.text}".rstrip()) as update,
        ):
            runner = capture_runner(
                config, cluster, starter=starter, folder=folder, logs=logs, progress=update
            )
            # Only memory counts: no steps to look for rare events, no second step to time.
            runner.spec = replace(runner.spec, watched_steps=0, least_steps=1)
            runner.after_first_message = end_stages
            return StageCaptures(runner=runner, folder=folder).variant(change.text, config.capture)


@dataclass(frozen=True, kw_only=True)
class StageCaptures:
    """The captured ranks of one variant, with their memory."""

    runner: CaptureRunner
    folder: Path
    peaks: dict[int, MemoryPeak] = field(default_factory=dict)
    """Memory peak by rank."""

    def variant(self, change: str, also: Sequence[int]) -> Variant:
        """Capture rank 0 and the ranks ``also``, then ranks along the axes of rank 0's messages."""
        first = sorted({0, *also})
        self.runner.capture(first)
        columns = columns_of(self.runner.traces[0])
        names = {rank: f"rank {rank}" for rank in first}
        if not columns:
            names[0] = "all ranks"
        between: list[tuple[int, int]] = []
        for column in columns:
            positions = self._positions(column.ranks)
            ranks = [column.ranks[position] for position in positions]
            if column.is_pipeline:
                names |= {rank: f"stage {p}" for rank, p in zip(ranks, positions, strict=True)}
                between += [(a + 1, b - 1) for a, b in pairwise(positions) if b - a > 1]
            else:
                names = {rank: f"rank {rank}" for rank in ranks} | names
        stages = tuple(self._memory_of(rank, name) for rank, name in names.items())
        return Variant(change=change, stages=stages, between=tuple(between))

    def _positions(self, column: Sequence[int]) -> list[int]:
        def capture(positions: Sequence[int]) -> None:
            ranks = [column[position] for position in positions]
            self.runner.capture([rank for rank in ranks if rank not in self.runner.traces])

        def parameter_bytes(position: int) -> int:
            kinds = self._peak(column[position]).kinds
            return next((share.n_bytes for share in kinds if share.kind == PARAMETERS), 0)

        return captured_positions(len(column), capture, parameter_bytes)

    def _memory_of(self, rank: int, name: str) -> StageMemory:
        facts = self.runner.traces[rank].facts
        return StageMemory(
            name=name,
            rank=rank,
            record=self._record(rank),
            peak=self._peak(rank),
            steps=facts.calls_tracked // facts.calls_per_step,
        )

    def _record(self, rank: int) -> MemoryRecord:
        record = self.runner.traces[rank].memory
        if record is None or record.reserved_bytes is None:
            raise UsageError("fit needs the memory of a GPU: leave out --no-memory")
        return record

    def _peak(self, rank: int) -> MemoryPeak:
        self._record(rank)
        if rank not in self.peaks:
            self.peaks[rank] = memory_peak(load_memory_log(memory_path(self.folder, rank)))
        return self.peaks[rank]


def _key(config: JobConfig, change: Change, cluster: Cluster) -> str:
    parts = [config.capture_key(cluster), sorted(change.environment.items()), "fit"]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
