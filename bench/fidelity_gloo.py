"""Emulated against real: 2 gloo ranks beside 1 live + 1 virtual, step by step in one run.

For each parallelism of the llama example: capture both ranks; then run, on the same two cores and
one step at a time in turn, (a) the real two-rank job and (b) rank 0 and rank 1 side by side, each
live against its own virtual peer. Medians of paired steps are compared, and peak memory to the
byte.

    python bench/fidelity_gloo.py --steps 120 --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

from keeper import Keeper
from prismscale.analysis.rows import Row, print_rows, write_rows
from prismscale.capture.launcher import CaptureRunner
from prismscale.capture.slices import SlicePlanner
from prismscale.capture.spec import CaptureSpec
from prismscale.graph.assemble import assemble
from prismscale.graph.groups import collect_groups
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.trace import RankTrace
from prismscale.live.spec import LiveSpec
from prismscale.live.stage import LiveStage
from prismscale.processes import Children

EXAMPLE = Path(__file__).parents[1] / "examples" / "llama" / "train.py"
CASES = {
    "DDP": ["--dp-mode", "ddp"],
    "FSDP2": ["--dp-mode", "fsdp2"],
    "TP 2": ["--tp", "2"],
    "PP 2": ["--pp", "2", "--microbatches", "4"],
}
WORLD = 2
MEDIAN_BAR = 2.0


def capture(args: list[str], cluster: str, folder: Path) -> tuple[JobGraph, dict[int, RankTrace]]:
    """Capture both ranks and build a graph in which each is alone."""
    out = folder / "captures"
    (out / "payloads").mkdir(parents=True)
    spec = CaptureSpec(
        rank=0,
        world_size=WORLD,
        local_world_size=WORLD,
        target=str(EXAMPLE),
        is_module=False,
        args=tuple(args),
        device="cpu",
        samples=30,
        step_marker=None,
        track_memory=True,
        communication_load=True,
        payloads=str(out / "payloads"),
        out=str(out),
    )
    runner = CaptureRunner(spec=spec, logs=folder / "logs")
    SlicePlanner(traces=runner.traces, capture=runner.capture, world_size=WORLD).plan()
    own = np.arange(WORLD)
    groups = collect_groups(runner.traces, WORLD, own)
    return assemble(runner.traces, own, groups), runner.traces


def live_stage(rank: int, args: list[str], cluster: str, folder: Path, steps: int) -> LiveStage:
    """One live rank against its own virtual peer."""
    out = folder / f"live-{rank}"
    out.mkdir()
    spec = LiveSpec(
        rank=rank,
        world_size=WORLD,
        local_world_size=WORLD,
        target=str(EXAMPLE),
        is_module=False,
        args=tuple(args),
        device="cpu",
        steps=steps,
        step_marker=None,
        clock="paced",
        live=(rank,),
        trace="",
        payloads=str(folder / "captures" / "payloads"),
        exchange="",
        communication_load=True,
        socket="",
        gate=str(folder / "gate"),
        out=str(out),
    )
    return LiveStage(spec=spec, folder=out, logs=folder / "logs", cluster=cluster, slow={}, hang={})


def run_case(args: list[str], cluster: str, steps: int) -> dict[str, object]:
    """Run one parallelism; returns paired step times and peaks."""
    with tempfile.TemporaryDirectory(prefix="fidelity-") as name:
        folder = Path(name)
        graph, traces = capture(args, cluster, folder)
        Keeper(folder / "gate", {"real": WORLD, "live": WORLD})
        stages = [live_stage(r, args, cluster, folder, steps) for r in range(WORLD)]
        seen: dict[int, dict[str, object]] = {}

        def run_live(rank: int) -> None:
            seen[rank] = stages[rank].run(graph, lambda *_: None, lambda _: None)[0]

        threads = [threading.Thread(target=run_live, args=(r,)) for r in range(WORLD)]
        with Children() as children:
            start_real(children, folder, args, traces, steps)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            while children.running:
                children.finished()
        real = [json.loads((folder / f"real-{r}.json").read_text()) for r in range(WORLD)]
    return {
        "real_ns": [r["step_ns"] for r in real],
        "live_ns": [np.diff(seen[r]["step_end_ns"]).tolist() for r in range(WORLD)],
        "lag_ns": [seen[r]["step_lag_ns"] for r in range(WORLD)],
        "real_peak": [r["peak_bytes"] for r in real],
        "live_peak": [seen[r]["peak_bytes"] for r in range(WORLD)],
    }


def start_real(
    children: Children, folder: Path, args: list[str], traces: dict[int, RankTrace], steps: int
) -> None:
    """Start the real job's processes with the environment that torchrun would give."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank in range(WORLD):
        meta = traces[rank].meta
        spec = {
            "target": str(EXAMPLE),
            "args": args,
            "gate": str(folder / "gate"),
            "steps": steps,
            "out": str(folder),
            **{k: meta[k] for k in ("period", "memory_marks", "prologue_marks")},
        }
        path = folder / f"real-{rank}.spec.json"
        path.write_text(json.dumps(spec))
        children.start(
            f"real {rank}",
            [sys.executable, str(Path(__file__).with_name("real_rank.py")), str(path)],
            folder / "logs" / f"real-{rank}.log",
            environment={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "LOCAL_WORLD_SIZE": str(WORLD),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
        )


def compare(case: str, found: dict[str, object]) -> list[Row]:
    """Rows of one case: error of medians with its confidence interval, and memory."""
    n = min(len(s) for s in (*found["real_ns"], *found["live_ns"]))  # type: ignore[attr-defined]
    real = np.mean([s[-n:] for s in found["real_ns"]], axis=0)  # type: ignore[attr-defined]
    live = np.mean([s[-n:] for s in found["live_ns"]], axis=0)  # type: ignore[attr-defined]
    error = 100 * (np.median(live) / np.median(real) - 1)
    rng = np.random.default_rng(0)
    draws = rng.integers(0, n, size=(2000, n))
    resampled = 100 * (np.median(live[draws], axis=1) / np.median(real[draws], axis=1) - 1)
    low, high = np.percentile(resampled, [2.5, 97.5])
    print(
        f"{case}: {n} paired steps, real {np.median(real) / 1e6:.2f} ms, live "
        f"{np.median(live) / 1e6:.2f} ms, error {error:+.2f} % (95 % interval {low:+.2f} … "
        f"{high:+.2f}), lag {np.median(found['lag_ns']) / 1e6:.2f} ms a step"  # type: ignore[arg-type]
    )
    print(f"  peaks: real {found['real_peak']}, live {found['live_peak']}")
    difference = max(
        abs(a - b)
        for a, b in zip(found["real_peak"], found["live_peak"], strict=True)  # type: ignore[call-overload]
    )
    return [
        Row.at_most(f"{case}: median step, live against real", abs(float(error)), MEDIAN_BAR, "%"),
        Row.at_most(f"{case}: peak memory, live against real", difference, 0, "bytes"),
    ]


def main() -> None:
    """Run the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120, help="paired steps")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--cluster", default="loopback-gloo")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[Row] = []
    for case in options.case or CASES:
        args = ["--model", options.model, "--steps", "100000", "--log-every", "1000", *CASES[case]]
        rows += compare(case, run_case(args, options.cluster, options.steps))
    print_rows(rows)
    if options.json:
        write_rows(rows, options.json)


if __name__ == "__main__":
    main()
