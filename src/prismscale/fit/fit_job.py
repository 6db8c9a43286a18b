"""From a program to the verdict: one capture of each stage, until its memory has settled."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prismscale.analysis.fit_result import FitResult, StageMemory, Variant
from prismscale.analysis.memory.memory_kinds import memory_peak
from prismscale.analysis.memory.memory_log import load_memory_log, memory_path
from prismscale.capture.launcher import CaptureRunner
from prismscale.cluster import Cluster
from prismscale.config import JobConfig
from prismscale.devices.null.build import build_extension, is_built
from prismscale.errors import PrismscaleError, ScriptError, UsageError
from prismscale.fit.stage_ranks import stage_ranks
from prismscale.fit.variants import Change
from prismscale.job_parts import capture_runner, fork_server
from prismscale.processes.variables import variables_set
from prismscale.progress import Reporter
from prismscale.runfolder import RunFolder

_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory", re.IGNORECASE)
LARGER = 16
"""Times the GPU's memory that a program which ran out of it is given, to see what it needs."""


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
            PrismscaleError: the program as it is cannot be captured.
        """
        began = time.monotonic()
        cluster = self.config.load_cluster()
        if not is_built():
            # Where its progress is seen: a rank would compile behind a log.
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
                stages = self._stages(config, change, cluster)
            except ScriptError as error:
                if not _OUT_OF_MEMORY.search(error.said or str(error)):
                    raise
                larger = replace(cluster.device, memory_bytes=LARGER * cluster.device.memory_bytes)
                stages = self._stages(config, change, replace(cluster, device=larger))
                return Variant(change=change.text, stages=stages, ran_out=error.said)
        return Variant(change=change.text, stages=stages)

    def _stages(
        self, config: JobConfig, change: Change, cluster: Cluster
    ) -> tuple[StageMemory, ...]:
        folder = self.folder.captures(_key(config, change, cluster)).absolute()
        logs = self.folder.logs
        with (
            fork_server(config, logs) as starter,
            self.reporter.stage(f"fit {change.text}".rstrip()) as update,
        ):
            runner = capture_runner(
                config, cluster, starter=starter, folder=folder, logs=logs, progress=update
            )
            # Nothing that happens now and then is looked for.
            runner.spec = replace(runner.spec, watched_steps=0)
            stages = _captured_stages(runner, config.capture)
        return tuple(_memory_of(runner, folder, rank, name) for rank, name in stages.items())


def _captured_stages(runner: CaptureRunner, also: Sequence[int]) -> dict[int, str]:
    """Captures one rank a stage, which rank 0 tells, and the ranks ``also``."""
    first = {0, *also}
    runner.capture(sorted(first))
    stages = stage_ranks(runner.traces[0])
    runner.capture([rank for rank in stages if rank not in first])
    return {rank: f"rank {rank}" for rank in also} | stages


def _memory_of(runner: CaptureRunner, folder: Path, rank: int, name: str) -> StageMemory:
    record = runner.traces[rank].memory
    if record is None or record.reserved_bytes is None:
        raise UsageError("fit needs the memory of a GPU: leave out --no-memory")
    peak = memory_peak(load_memory_log(memory_path(folder, rank)))
    return StageMemory(name=name, rank=rank, record=record, peak=peak)


def _key(config: JobConfig, change: Change, cluster: Cluster) -> str:
    parts = [config.capture_key(cluster), sorted(change.environment.items()), "fit"]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
