"""Kineto traces that we write, in HolisticTraceAnalysis itself, where it is installed
(``pip install HolisticTraceAnalysis``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from prismscale.formats.kineto.trace_writer import write_kineto
from prismscale.sim.timeline import simulate_steady
from support.jobs import RecordedDurations, job_from_traces
from support.overlapping_trace import EXPOSED_NS, HIDDEN_NS, STEP_NS, WORK_NS, overlapping_trace

hta = pytest.importorskip("hta.trace_analysis")
# What pandas deprecates of HTA's own calls is no error of ours.
pytestmark = pytest.mark.filterwarnings("default")


def test_its_breakdown_and_overlap_are_ours(tmp_path: Path) -> None:
    """Computation, exposed communication, idle time, and how much is hidden, to 1 %."""
    graph = job_from_traces({0: overlapping_trace(0)}, {0: 0, 1: 0})
    timeline = simulate_steady(graph, RecordedDurations(graph), ranks=[0, 1])[0]
    assert timeline.step_ns == STEP_NS
    write_kineto(graph, timeline, tmp_path)
    found = hta.TraceAnalysis(trace_dir=str(tmp_path))
    parts = found.get_temporal_breakdown(visualize=False)
    assert len(parts) == 2
    for column, ns in (("compute_time(us)", WORK_NS), ("non_compute_time(us)", EXPOSED_NS)):
        assert parts[column].tolist() == pytest.approx([ns / 1000] * 2, rel=0.01)
    overlap = found.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"]
    hidden = 100 * HIDDEN_NS / (HIDDEN_NS + EXPOSED_NS)
    assert overlap.tolist() == pytest.approx([hidden] * 2, rel=0.01)
