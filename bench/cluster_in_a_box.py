"""Emulated against real in a cluster in a box: jobs of 4 and 8 gloo ranks on this machine's cores.

Every rank has an equal CPU share (a cgroup quota) and a rate-limited link of its own (network
namespaces; see ``box.py``). The box is measured and described as a cluster, and the job is captured
under the same shares. Then a real job of N ranks and an emulated one (rank 0 live under its share,
the N - 1 others virtual) take turns, a block of steps each; who is not on turn uses no core. What
is compared: the median step of the real job, that of the simulated timeline, and that which the
live rank saw. No bar is set: figures are told as they are.

    sudo python bench/cluster_in_a_box.py --json out.json

Exit code 2 where no box can be made (not root, no cgroup ``cpu`` controller, no iproute2).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from box import Box, BoxSpec
from box_case import CaseInBox, Plan
from box_links import measure_cluster
from prismscale.errors import PrismscaleError
from prismscale.validation.rows import Row, finish, print_rows

JOB = ["--layers", "2", "--hidden", "128", "--ffn", "384", "--steps", "100000"]
"""Large enough that the wire takes much of a step, small enough for a fifth of a core."""
CASES = {
    "DDP": ["--dp-mode", "ddp"],
    "TP 2 × FSDP2": ["--tp", "2", "--dp-mode", "fsdp2"],
}
LIVE = 0
"""The live rank."""


def compare(name: str, case: CaseInBox) -> list[Row]:
    """Rows of medians and their errors."""
    captured = case.capture()
    predicted = captured.step.without_variation_ns
    seen = case.run(captured)
    watched = seen.live[LIVE]
    real, live = float(np.median(seen.real_ns)), float(np.median(watched.step_ns))
    rows = [
        Row.told("real step, median", real / 1e6, "ms"),
        Row.told("real step, between blocks", case.plan.spread(seen.real_ns), "%"),
        Row.told("simulated step", predicted / 1e6, "ms"),
        Row.told("simulated against real", 100 * (predicted / real - 1), "%"),
        Row.told("live step, median", live / 1e6, "ms"),
        Row.told("live step, between blocks", case.plan.spread(watched.step_ns), "%"),
        Row.told("live against real", 100 * (live / real - 1), "%"),
        Row.told("live, waiting in a step", float(np.median(watched.wait_ns)) / 1e6, "ms"),
        Row.told("live, lag in a step", float(np.median(watched.lag_ns)) / 1e6, "ms"),
    ]
    rows = [replace(row, name=f"{name}: {row.name}") for row in rows]
    print_rows(rows, title=f"{name}: {len(seen.real_ns)} real steps, {len(watched.step_ns)} live")
    return rows


def run_box(spec: BoxSpec, plan: Plan, model: str, cases: list[str]) -> list[Row]:
    """All cases at one world size."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="box-") as name, Box(spec) as box:
        links = Path(name) / "links"
        links.mkdir()
        cluster = measure_cluster(box, links)
        for index, case in enumerate(cases):
            folder = Path(name) / f"case-{index}"
            folder.mkdir()
            found = CaseInBox(
                box=box,
                args=("--model", model, *JOB, "--log-every", "1000", *CASES[case]),
                live=(LIVE,),
                cluster=cluster,
                folder=folder,
                plan=plan,
            )
            rows += compare(f"{spec.machines} ranks, {case}", found)
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, action="append", help="default: 4 and 8")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--model", default="debug")
    parser.add_argument("--block", type=int, default=6, help="steps of a block")
    parser.add_argument("--rounds", type=int, default=4, help="real and live blocks of each case")
    parser.add_argument("--rate", type=int, default=400, help="of each link, Mbit/s")
    parser.add_argument(
        "--busy", type=float, default=0.8, help="share of all cores that the ranks may use together"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    """Run the boxes asked for; returns the exit code."""
    options = _options()
    # What is undone on Ctrl-C must be undone on SIGTERM too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    plan = Plan(block=options.block, rounds=options.rounds)
    cores = len(os.sched_getaffinity(0))
    rows: list[Row] = []
    try:
        for ranks in options.ranks or (4, 8):
            share = min(1.0, options.busy * cores / ranks)
            spec = BoxSpec(machines=ranks, core_share=share, rate_mbit=options.rate)
            rows += run_box(spec, plan, options.model, options.case or list(CASES))
    except PrismscaleError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return finish(rows, title="Cluster in a box", json_path=options.json)


if __name__ == "__main__":
    sys.exit(main())
