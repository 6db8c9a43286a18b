"""Kineto traces that we write: what profilers' tools find in them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prismscale.analysis.attribution import break_down
from prismscale.errors import UsageError
from prismscale.formats.kineto.trace_writer import write_kineto
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.launch_paths import is_launch_path_N, work_beside_N
from prismscale.sim.timeline import Timeline, simulate, simulate_steady
from support.jobs import RecordedDurations, job_from_traces, pipeline_job

RANKS = (0, 7)


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    """A pipeline of two stages with tensor and data parallelism."""
    graph = pipeline_job(2, 2, 2, 4)
    return simulate_steady(graph, RecordedDurations(graph), ranks=RANKS)[0]


def loaded(path: Path) -> dict[str, Any]:
    """One file."""
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def kernels(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Device activities."""
    return [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]


def covered_us(events: Iterable[dict[str, Any]]) -> float:
    """Time in which at least one of some events runs."""
    total, until = 0.0, -np.inf
    for event in sorted(events, key=lambda e: e["ts"]):
        end = event["ts"] + event["dur"]
        total += max(0.0, end - max(until, event["ts"]))
        until = max(until, end)
    return total


def test_a_step_is_as_long_as_ours_and_says_what_it_is(timeline: Timeline, tmp_path: Path) -> None:
    """Rank, world, groups with their ranks, a profiler step, correlated launches."""
    paths = write_kineto(timeline.graph, timeline, tmp_path)
    assert [p.name for p in paths] == [f"rank.{r}.pt.trace.json.gz" for r in RANKS]
    trace = loaded(paths[1])
    about = trace["distributedInfo"]
    assert (about["rank"], about["world_size"]) == (7, 8)
    assert {g["pg_desc"]: g["ranks"] for g in about["pg_config"]}["tp"] == [6, 7]
    (step,) = (e for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep#"))
    assert step["dur"] * 1000 == timeline.rank_step_ns_TDR[-1, 0, 7]
    issued = [e for e in trace["traceEvents"] if e.get("cat") == "cuda_runtime"]
    launches = [e["args"]["correlation"] for e in issued]
    assert sorted(launches) == sorted(e["args"]["correlation"] for e in kernels(trace))


def test_communication_is_what_torch_calls_it(timeline: Timeline, tmp_path: Path) -> None:
    """NCCL's kernels with the arguments that tools read; messages with both ends."""
    trace = loaded(write_kineto(timeline.graph, timeline, tmp_path)[0])
    nccl = [e["args"] for e in kernels(trace) if e["name"].startswith("ncclDevKernel_")]
    by_name = {args["Collective name"]: args for args in nccl}
    assert set(by_name) == {"allreduce", "send", "recv"}
    assert by_name["send"]["Src Rank"] == 0
    assert by_name["send"]["Dst Rank"] == 4
    assert json.loads(by_name["allreduce"]["Process Group Ranks"]) in ([0, 1], [0, 2])


def test_parts_of_a_step_are_ours(timeline: Timeline, tmp_path: Path) -> None:
    """Time under computation, as tools measure it, is that of our breakdown."""
    for path, rank in zip(write_kineto(timeline.graph, timeline, tmp_path), RANKS, strict=True):
        spans = [e for e in loaded(path)["traceEvents"] if e.get("cat") == "cpu_op"]
        ours = break_down(timeline, rank)
        assert covered_us(spans) * 1000 == pytest.approx(ours.total_compute_ns, rel=0.01)


def test_work_is_the_kernels_that_are_known(timeline: Timeline, tmp_path: Path) -> None:
    """They fill the stretch that they were launched for, whatever they sum to."""
    builder = TraceBuilder(rank=0, world_size=1)
    builder.begin_body()
    builder.add_compute(1000, preds=[-1], lane="stream 0", label="forward")
    graph = job_from_traces({0: builder.build()})
    own = simulate(graph, RecordedDurations(graph), steps=2, ranks=[0])
    known = [("aten::mm", 300), ("aten::add", 100)]
    path = write_kineto(graph, own, tmp_path, kernels=lambda c, node: known)[0]
    assert [(e["name"], e["dur"]) for e in kernels(loaded(path))] == [
        ("aten::mm", 0.75),
        ("aten::add", 0.25),
    ]


def test_a_launch_path_belongs_to_the_work_before_it() -> None:
    """On its lane; the host's own work is none."""
    builder = TraceBuilder(rank=0, world_size=1)
    builder.begin_body()
    builder.add_compute(5, label="forward, host")
    builder.add_compute(7, lane="stream 0", label="forward")
    builder.add_compute(9, lane="stream 0", label="forward, host")
    trace = builder.build()
    assert is_launch_path_N(trace).tolist() == [False, False, True]
    assert work_beside_N(trace).tolist() == [0, 1, 1]


def test_a_timeline_without_ranks_is_refused(tmp_path: Path) -> None:
    """Nothing is written."""
    graph = pipeline_job(1, 2, 1, 1)
    with pytest.raises(UsageError, match="holds no rank"):
        write_kineto(graph, simulate(graph, RecordedDurations(graph)), tmp_path)
