"""Files of a run folder that somebody sent, as what reads them would be given."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from prismscale.analysis.memory.memory_log import load_memory_log, save_memory_log
from prismscale.cost.launch_log import load_launch_log
from prismscale.durations.samples import StepSamples
from prismscale.durations.samples_io import SAMPLES_FILE, load_samples, save_samples
from prismscale.durations.stored_events import (
    TABLE,
    EventFacts,
    StoredEvent,
    load_events,
    save_events,
)
from prismscale.progress import Terminal
from prismscale.report.folder import read_results, write_report
from prismscale.report.text import print_summary
from prismscale.runfolder import RunFolder
from prismscale.sim.timeline_io import load_timeline
from support.damage import bytes_damaged, json_damaged, table_damaged, text_damaged
from support.foreign_reader import Reader
from support.memory_logs import EVENTS, log_of
from support.null_run import stored_null_run
from support.report_job import report_run

_READ = (".json", ".parquet")


def run_files(folder: Path) -> list[Reader]:
    """A run's results, timeline, samples, memory, launches and periodic events; good files are made
    in ``folder``."""
    result, timeline, durations = report_run(
        live=False, pp=2, dp=2, microbatches=2, layers=1, samples=2
    )
    run = RunFolder(root=folder / "sent")
    write_report(run, result, timeline, durations)
    samples = StepSamples.from_graph(timeline.graph)
    save_samples(samples, run.graph)
    facts = EventFacts(numbers=(3, 6), every=3, site="train.py:7")
    save_events([StoredEvent(facts=facts, graph=timeline.graph)], run.periodic)
    save_memory_log(log_of(*EVENTS, owners={0: 0}), folder / "memory.parquet")
    launches = next(stored_null_run(folder / "null").rglob("launches*.parquet"))
    graph = timeline.graph
    return [
        _json("results", run.results, _shown),
        _json("periodic events", run.periodic / TABLE, lambda p: load_events(p.parent)),
        _table("timeline", run.timeline, lambda p: load_timeline(p, graph)),
        _table("samples", run.graph / SAMPLES_FILE, lambda p: load_samples(p.parent)),
        _table("memory log", folder / "memory.parquet", load_memory_log),
        _table("launch log", launches, load_launch_log),
    ]


def _json(name: str, path: Path, read: Callable[[Path], object]) -> Reader:
    return Reader(
        name=name,
        format="text",
        path=path.name,
        files=_beside(path),
        damages=(json_damaged, text_damaged, bytes_damaged),
        read=read,
    )


def _table(name: str, path: Path, read: Callable[[Path], object]) -> Reader:
    return Reader(
        name=name,
        format="Parquet",
        path=path.name,
        files=_beside(path),
        damages=(table_damaged, bytes_damaged),
        read=read,
    )


def _beside(path: Path) -> dict[str, bytes]:
    """The file, and what lies in its folder and those below."""
    files = (p for p in path.parent.rglob("*") if p.is_file() and p.suffix in _READ)
    return {str(p.relative_to(path.parent)): p.read_bytes() for p in files}


def _shown(path: Path) -> str:
    """What the terminal shows of a run that somebody sent."""
    shown = io.StringIO()
    print_summary(
        read_results(RunFolder(root=path.parent)),
        Terminal(file=shown, width=100, markup=False, highlight=False),
    )
    return shown.getvalue()
