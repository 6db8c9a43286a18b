"""A real gloo job of two ranks beside the forecasts of its captures: the whole distribution.

The same job is a few percent faster or slower each time it is launched, and the machine drifts. So
the real job and its capture are launched in turns (real, capture, capture, real, ...), each as
often as the other, and what all launches gave is compared. The floor is how far the first half of
the real steps is from the second.
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

from prismscale.validation.rows import Row
from runs import EXAMPLES, HERE, Runs

PROGRAM = EXAMPLES / "llama" / "train.py"
WORLD, ROUNDS, WARM_UP = 2, 6, 10
STEPS, SAMPLES, DRAWS = 100, 50, 500
"""Of one launch."""
LIMIT_S = 1200
"""Of one command."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""One thread a rank, as torchrun sets it."""
CASES = {
    "DDP": "--model tiny --dp-mode ddp --batch-size 2",
    "FSDP2": "--model tiny --dp-mode fsdp2 --batch-size 2",
}


def compare(folder: Path) -> list[Row]:
    """Rows of all cases."""
    rows: list[Row] = []
    for name, options in CASES.items():
        root = folder / f"gloo-{name}"
        real: list[NDArray[np.float64]] = []
        drawn: list[NDArray[np.float64]] = []
        for turn in range(ROUNDS):
            out = root / str(turn)
            if turn % 2:
                drawn.append(forecast(out, options))
            real.append(real_steps(out / "real", options))
            if not turn % 2:
                drawn.append(forecast(out, options))
        rows += rows_of(name, real, drawn)
    return rows


def real_steps(out: Path, options: str) -> NDArray[np.float64]:
    """Steps of the real job: from the last rank's end of one to its end of the next, in ns."""
    out.mkdir(parents=True, exist_ok=True)
    steps = ("--steps", str(STEPS + WARM_UP + 1), "--log-every", "1000")
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)),
            *("--master-port", "29517", str(HERE / "programs" / "timed.py"), str(out)),
            *(str(PROGRAM), *options.split(), *steps),
        ],
        check=True,
        capture_output=True,
        env={**os.environ, **ENVIRONMENT},
    )
    ends = [json.loads((out / f"rank-{r}.json").read_text()) for r in range(WORLD)]
    return np.diff(np.max(ends, axis=0))[WARM_UP:].astype(np.float64)


def forecast(root: Path, options: str) -> NDArray[np.float64]:
    """Draws of the step, from a capture of the same program."""
    root.mkdir(parents=True, exist_ok=True)
    runs = Runs(root, limit_s=LIMIT_S, environment=ENVIRONMENT)
    job = ("--world-size", WORLD, "--cluster", "loopback-gloo", "--samples", SAMPLES)
    steps = ("--steps", 1000, "--log-every", 1000)
    runs.run("run", job, (PROGRAM, *options.split(), *steps))
    runs.command("forecast", "run", "--draws", DRAWS).check_returncode()
    results = json.loads((root / "run" / "results.json").read_text())
    return np.array(results["forecast"]["step"]["step_ns"], dtype=np.float64)


def rows_of(
    name: str, real: list[NDArray[np.float64]], drawn: list[NDArray[np.float64]]
) -> list[Row]:
    """KS distance beside its floor, and the p95; by launch what differs between launches."""
    measured, drawn_D = np.concatenate(real), np.concatenate(drawn)
    half = len(measured) // 2
    first, second = measured[:half], measured[half:]
    floor = float(scipy.stats.ks_2samp(first, second).statistic)
    distance = float(scipy.stats.ks_2samp(measured, drawn_D).statistic)
    p50, p95 = (relative(drawn_D, measured, q) for q in (0.5, 0.95))
    return [
        Row.told(f"{name}, {len(measured)} steps: median", float(np.median(measured)) / 1e6, "ms"),
        Row.told(f"{name}: medians of {ROUNDS} launches, largest over smallest", spread(real), "%"),
        Row.told(f"{name}: medians of {ROUNDS} forecasts, same", spread(drawn), "%"),
        Row.told(f"{name}: KS of one half against the other (floor)", floor),
        Row.at_most(f"{name}: KS of forecast against measured", distance, floor + 0.05),
        Row.told(f"{name}: p50, forecast over measured", p50, "%"),
        Row.told(f"{name}: p95, second half over first", relative(second, first, 0.95), "%"),
        Row.at_most(f"{name}: p95, forecast against measured", abs(p95), 3, "%"),
    ]


def relative(a_S: NDArray[np.float64], b_S: NDArray[np.float64], q: float) -> float:
    """By how many percent a quantile of ``a`` is above that of ``b``."""
    return (float(np.quantile(a_S, q)) / float(np.quantile(b_S, q)) - 1) * 100


def spread(launches: list[NDArray[np.float64]]) -> float:
    """By how many percent the largest median is above the smallest."""
    medians = [float(np.median(launch)) for launch in launches]
    return (max(medians) / min(medians) - 1) * 100
