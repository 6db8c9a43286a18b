"""Chakra traces that we write, re-timed by ASTRA-sim itself, where it is built.

``PRISMSCALE_ASTRA_SIM`` names its program ``AstraSim_Analytical_Congestion_Unaware``, built from
https://github.com/astra-sim/astra-sim.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from prismscale.formats.chakra import write_chakra
from prismscale.graph.builder import TraceBuilder
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import GroupRecord, RankTrace
from prismscale.sim.timeline import simulate
from support.jobs import RecordedDurations, job_from_traces

PROGRAM = os.environ.get("PRISMSCALE_ASTRA_SIM", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="PRISMSCALE_ASTRA_SIM names no ASTRA-sim")
RANKS, BYTES, LATENCY_NS = 8, 64 * 2**20, 500
GIB_PER_S = 50
BYTES_PER_NS = GIB_PER_S * 2**30 / 1e9
RING = (RANKS - 1) * (BYTES / RANKS / BYTES_PER_NS + LATENCY_NS)
"""Nanoseconds of a ring that passes each member's part to all others."""
LATE_RANK, LATE_NS = 3, 1_000_000
SYSTEM = {
    "scheduling-policy": "FIFO",
    "endpoint-delay": 1,
    "active-chunks-per-dimension": 1,
    "preferred-dataset-splits": 1,
    "all-reduce-implementation": ["ring"],
    "all-gather-implementation": ["ring"],
    "reduce-scatter-implementation": ["ring"],
    "all-to-all-implementation": ["ring"],
    "collective-optimization": "baseline",
    "local-mem-bw": 1_000_000,
    "boost-mode": 0,
}


def trace(rank: int) -> RankTrace:
    """Work, gather, work, add up; then all of it again, each after the last. One rank is late for
    the first."""
    builder = TraceBuilder(
        rank=rank,
        world_size=RANKS,
        groups=[GroupRecord(ranks=tuple(range(RANKS)), name="world", backend="nccl")],
    )
    builder.begin_body()
    last = -1
    for n, (op, rings) in enumerate(
        ((CollectiveOp.ALL_GATHER, 1), (CollectiveOp.ALL_REDUCE, 2)) * 2
    ):
        work_ns = 3_000_000 + (LATE_NS if n == 0 and rank == LATE_RANK else 0)
        last = builder.add_compute(work_ns, preds=[last], lane="stream 0", label="forward")
        last = builder.add_communication(
            op, BYTES, preds=[last], durations_ns=round(rings * RING), lane="nccl"
        )
    return builder.build()


def configured(folder: Path) -> list[str]:
    """ASTRA-sim's own files: a ring of as many GPUs with the same links."""
    texts = {
        "system": json.dumps(SYSTEM),
        "network": f"topology: [ Ring ]\nnpus_count: [ {RANKS} ]\n"
        f"bandwidth: [ {GIB_PER_S} ]\nlatency: [ {LATENCY_NS} ]\n",
        "remote-memory": json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [f"--{name}-configuration={folder / name}" for name in texts]


def test_its_step_is_ours(tmp_path: Path) -> None:
    """To 3 %, with collectives that ASTRA-sim times itself."""
    graph = job_from_traces({rank: trace(rank) for rank in range(RANKS)})
    durations = RecordedDurations(graph)
    timeline = simulate(graph, durations, steps=1, ranks=range(RANKS))
    write_chakra(graph, timeline, durations, tmp_path / "et")
    done = subprocess.run(
        [
            PROGRAM,
            f"--workload-configuration={tmp_path / 'et' / 'trace'}",
            f"--comm-group-configuration={tmp_path / 'et' / 'comm_group.json'}",
            *configured(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=True,
    )
    ended_ns = [int(n) for n in re.findall(r"finished, (\d+) cycles", done.stdout)]

    assert len(ended_ns) == RANKS
    assert max(ended_ns) == pytest.approx(timeline.step_ns, rel=0.03)
