"""Kineto traces that we write, in TraceLens itself, where it is installed
(https://github.com/AMD-AGI/TraceLens)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from prismscale.formats.kineto.trace_writer import write_kineto
from prismscale.sim.timeline import simulate_steady
from support.jobs import RecordedDurations, job_from_traces
from support.overlapping_trace import (
    EXPOSED_NS,
    HIDDEN_NS,
    IDLE_NS,
    STEP_NS,
    WORK_NS,
    overlapping_trace,
)

tracelens = pytest.importorskip("TraceLens.TreePerf.gpu_event_analyser")


def test_its_breakdown_is_ours(tmp_path: Path) -> None:
    """Computation, exposed communication, all communication and idle time, to 1 %."""
    graph = job_from_traces({0: overlapping_trace(0)}, {0: 0, 1: 0})
    timeline = simulate_steady(graph, RecordedDurations(graph), ranks=[0])[0]
    (path,) = write_kineto(graph, timeline, tmp_path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    # TraceLens numbers events as it loads a file; its analyser takes numbered ones.
    numbered = [event | {"UID": n} for n, event in enumerate(events)]
    found = tracelens.PytorchGPUEventAnalyser(numbered).compute_metrics()

    told = {
        "computation_time": WORK_NS,
        "exposed_comm_time": EXPOSED_NS,
        "total_comm_time": HIDDEN_NS + EXPOSED_NS,
    }
    for name, ns in told.items():
        assert found[name] == pytest.approx(ns / 1000, rel=0.01), name
    # Idle time counts between the first kernel of the step and its last.
    assert pytest.approx(found["total_time"] * 1000, rel=0.01) == STEP_NS - IDLE_NS
