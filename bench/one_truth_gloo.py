"""A real gloo job of two ranks beside the forecast of its capture: the whole distribution.

300 steps of the real job, its capture and forecast, and 300 more steps: so drift of the machine is
in the measured distribution and in the floor, which is how far the halves are from each other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import scipy
from numpy.typing import NDArray

from prismscale.analysis.rows import Row

HERE = Path(__file__).parent
PROGRAM = HERE.parent / "examples" / "llama" / "train.py"
WORLD, HALF, SAMPLES, WARM_UP = 2, 300, 150, 10
CASES = {
    "DDP": "--model tiny --dp-mode ddp --batch-size 2",
    "FSDP2": "--model tiny --dp-mode fsdp2 --batch-size 2",
}


def compare(folder: Path) -> list[Row]:
    """Rows of all cases."""
    rows: list[Row] = []
    for name, options in CASES.items():
        root = folder / f"gloo-{name}"
        halves = [real_steps(root / "first", options)]
        drawn_D = forecast(root, options)
        halves.append(real_steps(root / "second", options))
        rows += rows_of(name, halves, drawn_D)
    return rows


def real_steps(out: Path, options: str) -> NDArray[np.float64]:
    """Steps of the real job: from the last rank's end of one to its end of the next, in ns."""
    out.mkdir(parents=True, exist_ok=True)
    steps = ("--steps", str(HALF + WARM_UP + 1), "--log-every", "1000")
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)),
            *("--master-port", "29517", str(HERE / "programs" / "timed.py"), str(out)),
            *(str(PROGRAM), *options.split(), *steps),
        ],
        check=True,
        capture_output=True,
        env=environment(),
    )
    ends = [json.loads((out / f"rank-{r}.json").read_text()) for r in range(WORLD)]
    return np.diff(np.max(ends, axis=0))[WARM_UP:].astype(np.float64)


def forecast(root: Path, options: str) -> NDArray[np.float64]:
    """Draws of the step, from a capture of the same program."""
    run = root / "run"
    steps = ("--steps", "1000", "--log-every", "1000")
    for command in (
        (
            *("run", "--world-size", str(WORLD), "--cluster", "loopback-gloo"),
            *("--samples", str(SAMPLES), "--out", str(run)),
            *(str(PROGRAM), *options.split(), *steps),
        ),
        ("forecast", str(run), "--draws", "2000"),
    ):
        subprocess.run(
            [sys.executable, "-m", "prismscale.cli", *command],
            check=True,
            capture_output=True,
            env=environment(),
        )
    results = json.loads((run / "results.json").read_text())
    return np.array(results["forecast"]["step"]["step_ns"], dtype=np.float64)


def environment() -> dict[str, str]:
    """One thread a rank, as torchrun sets it."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def rows_of(
    name: str, halves: list[NDArray[np.float64]], drawn_D: NDArray[np.float64]
) -> list[Row]:
    """KS distance beside its floor, and the p95."""
    measured = np.concatenate(halves)
    floor = float(scipy.stats.ks_2samp(*halves).statistic)
    distance = float(scipy.stats.ks_2samp(measured, drawn_D).statistic)
    p50, p95 = (
        (float(np.quantile(drawn_D, q)) / float(np.quantile(measured, q)) - 1) * 100
        for q in (0.5, 0.95)
    )
    halves_p95 = abs(float(np.quantile(halves[0], 0.95) / np.quantile(halves[1], 0.95)) - 1) * 100
    return [
        Row.told(f"{name}, {len(measured)} steps: median", float(np.median(measured)) / 1e6, "ms"),
        Row.told(f"{name}: KS of one half against the other (floor)", floor),
        Row.at_most(f"{name}: KS of forecast against measured", distance, floor + 0.05),
        Row.told(f"{name}: p50, forecast over measured", p50, "%"),
        Row.told(f"{name}: p95, one half against the other", halves_p95, "%"),
        Row.at_most(f"{name}: p95, forecast against measured", abs(p95), 3, "%"),
    ]
