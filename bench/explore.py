"""Layouts of a real program, explored by running them; and the same on a Ray cluster.

    python bench/explore.py [--part layouts|ray]… [--keep FOLDER] [--json PATH]

Run with a Python that has torchtitan 0.3.0 (the CPU build of torch 2.13), Ray and prismscale. The
layouts are twelve of torchtitan's own Llama-3.1 8B on 64 null H100s, swept with ``--quick``; each
of them is run by itself too, with the same options and without ``--quick``. On Ray a small model is
explored on three nodes here, one of which is killed while it runs points, and a run's step time is
drawn in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from null_programs import prepare
from prismscale.validation.rows import Row, finish, read_rows
from runs import PARTIAL, TITAN, Runs

LIMIT_S = 7_200
CORES = 2
QUICK = "--quick"
LAYOUT = "8B at 64 ranks"
JOB = ("--device", "null", "--cluster", "h100-sxm")
SHARED = (
    *("--dataloader.dataset", "c4_test", "--metrics.log_freq", "1", "--training.steps", "4"),
    *("--training.local_batch_size", "8"),
)
"""The batch of each data-parallel rank stays, so layouts are compared by tokens a second."""
LAYOUTS = (
    "tp: --parallelism.tensor_parallel_degree {2,4,8}",
    "pp: --parallelism.pipeline_parallel_degree {2,4}",
    "schedule: --parallelism.pipeline_parallel_schedule {1F1B,Interleaved1F1B}",
)
SMALL = (
    "tp: --parallelism.tensor_parallel_degree {1,2,3}",
    "pp: --parallelism.pipeline_parallel_degree {1,2}",
)
DRAWS = ("--draws", 4_000, "--seed", 3, "--memory", 0.02)
COSTS = ("wall_s", "peak_rss_bytes")
"""What a run says of itself and not of the job."""


def program(model: str, folder: Path) -> tuple[object, ...]:
    """Torchtitan with a model of its own."""
    assets = ("--hf_assets_path", folder / "tokenizer")
    return (TITAN, "--module", "llama3", "--config", model, *PARTIAL, *SHARED, *assets)


def layouts(runs: Runs) -> list[Row]:
    """Twelve layouts of 8B at 64 ranks, and each of them alone."""
    began, cpu = time.monotonic(), cpu_s()
    out = runs.folder / "layouts"
    quick = (*JOB, "--world-size", 64, QUICK)
    explore(runs, out, quick, LAYOUTS, program("llama3_8b", runs.folder))
    wall, cpu = time.monotonic() - began, cpu_s() - cpu
    return [
        Row.at_most(f"{LAYOUT}: 12 layouts, wall time on {CORES} cores", wall, 360.0, "s"),
        Row.told(f"{LAYOUT}: 12 layouts, time of all processes", cpu, "s"),
        *against_runs(runs, read(out)),
    ]


def against_runs(runs: Runs, swept: Mapping[str, Any]) -> list[Row]:
    """The rows of a sweep beside runs of the same commands."""
    found = [row for row in swept["points"] if row["status"] == "done"]
    same = [alone_ns(runs, f"same-{i}", row) for i, row in enumerate(found)]
    whole = [alone_ns(runs, f"alone-{i}", row, without=QUICK) for i, row in enumerate(found)]
    off = [abs(row["step_ns"] - ns) for row, ns in zip(found, same, strict=True)]
    off_whole = [abs(row["step_ns"] / ns - 1) for row, ns in zip(found, whole, strict=True)]
    best = max(range(len(found)), key=lambda i: found[i]["tokens_per_step"] / whole[i])
    chosen = found[best]["values"] == swept["chosen"]
    step = f"{LAYOUT}: step of a row against run"
    return [
        Row.at_least(f"{LAYOUT}: layouts with figures", len(found), 12),
        Row.at_most(f"{step}, largest difference", max(off), 0, "ns"),
        Row.told(f"{step} without --quick, largest difference", 100 * max(off_whole), "%"),
        Row.at_least(f"{LAYOUT}: chosen is the best of running all", int(chosen), 1),
        Row.told(f"{LAYOUT}: best over worst, tokens a second", spread(found)),
    ]


def alone_ns(runs: Runs, out: str, row: Mapping[str, Any], without: str = "") -> int:
    """The step of a row's command, run by itself."""
    arguments = [word for word in shlex.split(row["arguments"]) if word != without]
    return int(runs.run(out, (), arguments).get("step_ns", 0))


def spread(rows: Sequence[Mapping[str, Any]]) -> float:
    """How much faster the best layout is than the worst."""
    speeds = [row["tokens_per_s"] for row in rows]
    return max(speeds) / min(speeds)


def on_ray(runs: Runs) -> list[Row]:
    """A sweep and draws on three nodes, of which one is lost, beside the same on none."""
    import ray
    from ray.cluster_utils import Cluster as RayTestCluster

    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = RayTestCluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        nodes = sum(node["Alive"] for node in ray.nodes())
        return [
            Row.at_least("Ray: nodes that stay", nodes, 2),
            *sweep_on_ray(runs, cluster),
            *draws_on_ray(runs, cluster),
        ]
    finally:
        ray.shutdown()
        cluster.shutdown()


def sweep_on_ray(runs: Runs, cluster: Any) -> list[Row]:
    """Points on nodes."""
    job = (*JOB, "--world-size", 16)
    small = program("llama3_debugmodel", runs.folder)
    here, there = runs.folder / "here", runs.folder / "there"
    # torch.compile leaves 512 bytes more on a device where its cache on disk is warm.
    explore(runs, runs.folder / "warm", job, SMALL, small)
    explore(runs, here, job, SMALL, small)
    begun = start(runs, "explore", *arguments(there, job, SMALL, small, *address(cluster)))
    lose_a_node(cluster, begun)
    tables = [(here / name, there / name) for name in ("explore.json", "explore.csv")]
    different = sum(a.read_bytes() != b.read_bytes() for a, b in tables)
    rows = read(there)["points"]
    done = [row for row in rows if row["status"] == "done"]
    wrong = sum(figures(here / row["folder"]) != figures(there / row["folder"]) for row in done)
    name = "Ray, a node killed in the middle"
    return [
        Row.at_least(f"{name}: points of a sweep", len(rows), 6),
        Row.at_least(f"{name}: of them with figures", len(done), 4),
        Row.at_most(f"{name}: tables that differ from local ones by a byte", different, 0),
        Row.at_most(f"{name}: run folders with other figures", wrong, 0),
    ]


def draws_on_ray(runs: Runs, cluster: Any) -> list[Row]:
    """Draws on nodes."""
    first = next(row for row in read(runs.folder / "here")["points"] if row["status"] == "done")
    here, there = runs.folder / "drawn-here", runs.folder / "drawn-there"
    for folder in (here, there):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(runs.folder / "here" / first["folder"], folder)
    check(runs.command("forecast", here, *DRAWS, "--executor", "serial"))
    lose_a_node(cluster, start(runs, "forecast", there, *DRAWS, *address(cluster)))
    drawn = [json.loads((f / "results.json").read_text())["forecast"] for f in (here, there)]
    return [
        Row.told("Ray, a node killed in the middle: draws of a step", DRAWS[1]),
        Row.at_most(
            "Ray, a node killed in the middle: forecasts that differ from local ones",
            int(drawn[0] != drawn[1]),
            0,
        ),
    ]


def lose_a_node(cluster: Any, command: subprocess.Popen[str]) -> None:
    """Add a node, and kill it when it works; the command must end well all the same."""
    import ray

    lost = cluster.add_node(num_cpus=2)
    idle = ray.cluster_resources()["CPU"]
    while ray.available_resources().get("CPU", 0.0) > idle - 4:
        if command.poll() is not None:
            sys.exit(f"ended before a node could be lost:\n{command.communicate()[0][-3000:]}")
        time.sleep(0.05)
    time.sleep(1.0)
    cluster.remove_node(lost, allow_graceful=False)
    said, _ = command.communicate(timeout=LIMIT_S)
    if command.returncode:
        sys.exit(said[-3000:])


def address(cluster: Any) -> tuple[object, ...]:
    """Options for commands that are to run on a cluster."""
    return ("--executor", "ray", "--address", cluster.address)


def arguments(
    out: Path, job: Sequence[object], vary: Sequence[str], script: Sequence[object], *more: object
) -> list[object]:
    """Of ``prismscale explore``."""
    varied = [part for text in vary for part in ("--vary", text)]
    return [*job, "--out", out, *varied, *more, "--", *script]


def explore(runs: Runs, out: Path, *parts: Sequence[object]) -> None:
    """``prismscale explore`` on this machine."""
    job, vary, script = parts
    check(runs.command("explore", *arguments(out, job, [str(v) for v in vary], script)))


def start(runs: Runs, *words: object) -> subprocess.Popen[str]:
    """A command that goes on meanwhile."""
    return subprocess.Popen(
        [sys.executable, "-m", "prismscale", *map(str, words)],
        cwd=runs.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check(done: subprocess.CompletedProcess[str]) -> None:
    """Stop where a command failed."""
    if done.returncode:
        sys.exit(f"{shlex.join(done.args)}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


def read(out: Path) -> dict[str, Any]:
    """A sweep's table."""
    found: dict[str, Any] = json.loads((out / "explore.json").read_text())
    return found


def figures(folder: Path) -> dict[str, Any]:
    """What a run found out, but for what it cost."""
    found = json.loads((folder / "results.json").read_text())
    return {name: value for name, value in found.items() if name not in COSTS}


def cpu_s() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


PARTS = {"layouts": layouts, "ray": on_ray}


def main() -> int:
    """Run the parts, print the table, and write it where asked; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "tokenizer").exists():
            prepare(folder)
        chosen = options.part or list(PARTS)
        kept = {"layouts": "8B", "ray": "Ray"}
        # The table in the file stays whole where only one part is run again.
        others = tuple(start for part, start in kept.items() if part not in chosen)
        rows = [row for row in read_rows(options.json) if row.name.startswith(others)]
        for part in chosen:
            rows += PARTS[part](Runs(folder, limit_s=LIMIT_S))
    return finish(rows, title="Explored layouts", json_path=options.json)


if __name__ == "__main__":
    sys.exit(main())
