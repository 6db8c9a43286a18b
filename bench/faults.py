"""Stragglers, hangs and kills, as a user meets them.

    python bench/faults.py [--json PATH] [--kills N]

The llama example (debug) at world size 1,024: a straggler, against the bounds that arithmetic
gives; the same at 64 ranks against the oracle of ``tests/support/oracle.py``, which walks every
event of every rank; a hung rank and the groups that must be named. Then a small job with two live
ranks is ended by SIGINT, SIGTERM and SIGKILL at moments spread over its whole run: nobody and
nothing may be left.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

import tests_on_path  # noqa: F401
from prismscale.cluster import Cluster
from prismscale.cost.collective import collective_model
from prismscale.durations.faults import Faults
from prismscale.durations.graph_durations import GraphDurations
from prismscale.durations.source import DurationSource, LaterDurations
from prismscale.graph.io import load_graph
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import NodeKind
from prismscale.sim.retime import MOST_SAMPLED_STEPS, STEPS
from prismscale.sim.timeline import simulate
from prismscale.validation.rows import Row, finish
from support.jobs import job_from_traces
from support.oracle import simulate_ranks
from support.runs import FEW, command, environment, left_running, results, write_program
from support.traces import loop_trace

EXAMPLE = Path(__file__).parents[1] / "examples" / "llama" / "train.py"
PROGRAM = [EXAMPLE, "--device", "cpu", "--model", "debug", "--tp", "8", "--pp", "4"]
ENDLESS = ["--dp-mode", "fsdp2", "--microbatches", "8", "--steps", "1000", "--log-every", "1000"]
CLUSTER = "h100-sxm"
SLOW_RANK, FACTOR = 17, 1.3
MODEL = collective_model(Cluster.load(CLUSTER))


def run(out: Path, world_size: int, *options: object) -> subprocess.CompletedProcess[str]:
    """``prismscale run`` on the llama example; captures are reused from call to call."""
    fixed = ["--world-size", world_size, "--cluster", CLUSTER, "--samples", 2, "--no-memory"]
    words = command("run", *fixed, "--out", out, *options, *PROGRAM, *ENDLESS)
    return subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)


def straggler(folder: Path) -> list[Row]:
    """World size 1,024, with and without: at most all of the rank's extra computation is seen."""
    out = folder / "large"
    plain = _step(out, run(out, 1024))
    compute = sum(results(out)["stages"][0]["breakdown"]["compute_ns"].values())
    slow = _step(out, run(out, 1024, "--slow", f"{SLOW_RANK}={FACTOR}"))
    risen = slow - plain
    return [
        Row.told("1,024 ranks: step", plain / 1e6, "ms"),
        Row.told(f"1,024 ranks: step with --slow {SLOW_RANK}={FACTOR}", slow / 1e6, "ms"),
        Row.at_least("1,024 ranks: rise over the rank's computation", risen / compute, 0),
        Row.at_most("1,024 ranks: rise over the rank's computation", risen / compute, FACTOR - 1),
    ]


def _step(out: Path, done: subprocess.CompletedProcess[str]) -> int:
    if done.returncode:
        raise SystemExit(done.stderr)
    return int(results(out)["step_ns"])


def oracle(folder: Path) -> list[Row]:
    """The same program at 64 ranks: each rank's events one by one give the same step."""
    out = folder / "small"
    rows = []
    for slow in ({}, {SLOW_RANK: FACTOR}):
        options = [o for r, f in slow.items() for o in ("--slow", f"{r}={f}")]
        found = _step(out, run(out, 64, *options))
        graph = load_graph(out / "graph")
        faults = Faults(slow=slow)
        durations = GraphDurations(graph=graph, model=MODEL, faults=faults, sampled=True)
        name = f"64 ranks{', one slow' if slow else ''}: step against the oracle"
        rows.append(Row.at_most(name, abs(found - typical_ns(graph, durations)), 0, "ns"))
    return rows


def typical_ns(graph: JobGraph, durations: GraphDurations) -> int:
    """The median of the oracle's sampled steps, re-timed by the oracle as the last of a few."""
    settling, sampled = STEPS - 1, min(durations.n_samples, MOST_SAMPLED_STEPS)
    step_ns = oracle_step_ns(graph, durations, settling + sampled)[settling:]
    middle = sorted(range(sampled), key=step_ns.__getitem__)[(sampled - 1) // 2]
    return oracle_step_ns(graph, LaterDurations(durations=durations, first=middle), STEPS)[-1]


def oracle_step_ns(graph: JobGraph, durations: DurationSource, steps: int) -> list[int]:
    """The job's steps as the oracle has them."""
    end_ns = simulate_ranks(graph, durations, steps=steps).step_end
    ends = [max(end_ns[r, s] for r in range(graph.world_size)) for s in range(steps)]
    return [end - before for before, end in pairwise([0, *ends])]


def arithmetic() -> list[Row]:
    """Pure data parallelism without overlap: the step rises by exactly the extra computation."""
    graph = job_from_traces({0: loop_trace(1024, 1 << 20)})
    step_ns = [
        simulate(graph, GraphDurations(graph=graph, model=MODEL, faults=Faults(slow=slow))).step_ns
        for slow in ({}, {SLOW_RANK: FACTOR})
    ]
    extra = round(1_000 * (FACTOR - 1))
    off = abs(step_ns[1] - step_ns[0] - extra)
    return [Row.at_most("1,024 in lockstep: rise against arithmetic", off, 0, "ns")]


def hang(folder: Path) -> list[Row]:
    """Rank 17 stops at step 3: exit code, its name, and each of its groups that communicates."""
    out = folder / "large"
    done = run(out, 1024, "--hang", f"{SLOW_RANK}@step3")
    graph = load_graph(out / "graph")
    rank_class = graph.classes[int(graph.class_of_R[SLOW_RANK])]
    trace = rank_class.trace
    body = range(trace.n_prologue, trace.n_nodes)
    group_indices = {
        int(trace.group_index_N[i]) for i in body if trace.kind_N[i] == NodeKind.COLLECTIVE
    }
    names = {trace.groups[group_index].name for group_index in group_indices}
    direct = [h for h in results(out)["hangs"] if f"for rank {SLOW_RANK}:" in h]
    named = sum(any(f"group '{name}'" in h for h in direct) for name in names)
    return [
        Row.at_most("hang: exit code, off from 5", abs(done.returncode - 5), 0),
        Row.at_least("hang: rank 17 named on the terminal", done.stderr.count("rank 17"), 1),
        Row.at_least("hang: its groups that are named", named, len(names)),
        Row.told("hang: groups that wait for it directly", len(direct)),
        Row.told("hang: groups that wait in all", len(results(out)["hangs"])),
    ]


def kills(folder: Path, n: int) -> list[Row]:
    """A small job with two live ranks, ended ``n`` times by each signal."""
    script = write_program(folder / "program")
    began = time.monotonic()
    _wait_for(_small(folder / "whole", script, ""))
    whole_s = time.monotonic() - began
    rows, clock = [], random.Random(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        seen = {"left running": 0, "shared memory left": 0, "half-written": 0, "wrong exit code": 0}
        for k in range(n):
            after_s = whole_s * (k + clock.random()) / n
            _kill(folder / f"{number.name}-{k}", script, number, after_s, seen)
        rows += [Row.at_most(f"{n} × {number.name}: {what}", v, 0) for what, v in seen.items()]
    return [Row.told("small job, left alone", whole_s, "s"), *rows]


def _small(out: Path, script: Path, mark: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("run", "--world-size", 4, "--live", "0,1", "--out", out, *FEW, script),
        env=environment(mark),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for(run: subprocess.Popen[str]) -> None:
    _, said = run.communicate()
    if run.returncode:
        raise SystemExit(said)


def _kill(
    out: Path, script: Path, number: signal.Signals, after_s: float, seen: dict[str, int]
) -> None:
    mark = uuid.uuid4().hex
    run = _small(out, script, mark)
    time.sleep(after_s)
    run.send_signal(number)
    _, said = run.communicate()
    # Ended before it could take notice, or after all was done.
    expected = {0, -number, 128 + number}
    if run.returncode not in expected:
        seen["wrong exit code"] += 1
        print(f"{number.name} after {after_s:.2f} s: exit code {run.returncode}", said, sep="\n")
    seen["left running"] += len(left_running(mark))
    seen["shared memory left"] += len(list(Path("/dev/shm").glob(f"prismscale-{run.pid}-*")))
    seen["half-written"] += not _readable(out / "results.json")
    if number != signal.SIGKILL:
        seen["half-written"] += len(list(out.rglob(".*.part")))


def _readable(path: Path) -> bool:
    """A file that is not there is not half-written."""
    try:
        found: Any = json.loads(path.read_text())
    except FileNotFoundError:
        return True
    except ValueError:
        return False
    return bool(found)


def main() -> int:
    """Measure, print, and fail where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kills", type=int, default=6, help="of each signal")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        rows = [*arithmetic(), *oracle(folder), *straggler(folder), *hang(folder)]
        rows += kills(folder, options.kills)
    return finish(rows, json_path=options.json)


if __name__ == "__main__":
    sys.exit(main())
