"""The memory of shown ranks, as counter curves of a Perfetto trace."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prismscale.analysis.memory.memory_log import load_memory_log, memory_path
from prismscale.analysis.memory.memory_timeline import memory_timeline
from prismscale.durations.scenario import Scenario
from prismscale.formats.perfetto_counters import StepCurve
from prismscale.runfolder import RunFolder

CLOCK = "issuing host's time"
"""Clock of the curves: blocks come and go as the host issues work, ahead of the device."""


def memory_curves(folder: RunFolder, ranks: Iterable[int]) -> dict[int, list[StepCurve]]:
    """Return allocated and reserved bytes over the step with the memory peak, by rank.

    Ranks whose memory was not tracked are left out.

    Raises:
        FormatError: a file is damaged.
    """
    if not folder.scenario.exists():
        return {}
    captures = folder.root / Scenario.load(folder.scenario).captures
    paths = {rank: memory_path(captures, rank) for rank in ranks}
    return {rank: _curves(path) for rank, path in paths.items() if path.is_file()}


def _curves(path: Path) -> list[StepCurve]:
    found = memory_timeline(load_memory_log(path))
    by_name = {"allocated": found.bytes_KT.sum(axis=0), "reserved": found.reserved_bytes_T}
    return [
        StepCurve(
            name=f"memory {name} ({CLOCK})", unit="B", time_ns_P=found.time_ns_T, value_P=bytes_T
        )
        for name, bytes_T in by_name.items()
    ]
