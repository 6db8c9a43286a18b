"""Memory and steps of experts that get more or fewer rows: real ranks beside live ones.

The four ranks that share experts are there twice: a rank and the one four further do the same.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from allocations import build_counter
from box import Box, BoxSpec
from box_case import CaseInBox, Plan
from box_links import measure_cluster
from prismscale.validation.rows import Row
from real_layouts import LIMIT_S, LLAMA, under_torchrun
from runs import HERE, Runs, folder_name

PEAKS = HERE / "programs" / "peaks.py"
RANKS = 8
LIVE = (0, 1)
"""The first has the experts that get more, the second others."""
STEPS = 6
TIMES = 3
"""Real runs: what gloo's threads allocate meets the program's peak in some and not in others."""
LARGEST_DIFFERENCE = 1.0
"""Percent of the real rank's peak."""
RATIOS = (1.0, 1.5, 3.0)
STEP_BAR = 3.0
"""Percent of the real step."""
BOX = BoxSpec(machines=RANKS, core_share=0.2, rate_mbit=4000)
"""Eight ranks on two cores: what a rank may use of one, so that all can run at once."""
BATCH = 4
"""Samples, so that computation, which is what balance changes, takes most of a step."""
TURNS = Plan(block=3, rounds=5)


def measure(ratio: float, folder: Path) -> list[Row]:
    """The experts of the first of four ranks get ``ratio`` times an equal share of all rows."""
    really = folder / folder_name(f"experts {ratio} real")
    really.mkdir(exist_ok=True)
    layout = ("--model", "tiny-moe", "--ep", 4, "--force-balance", ratio)
    program = (LLAMA, *layout, "--steps", STEPS)
    counter = build_counter(folder)
    peaks: dict[int, list[int]] = {rank: [] for rank in LIVE}
    for _ in range(TIMES):
        under_torchrun(RANKS, (PEAKS, really, *program), extra=counter)
        for rank in LIVE:
            alike = (really / f"peak-{r}" for r in range(rank, RANKS, RANKS // 2))
            peaks[rank] += [int(path.read_text()) for path in alike]
    job = ("--world-size", RANKS, "--cluster", "loopback-gloo", "--samples", 2, "--steps", 2)
    given = ("--live", ",".join(map(str, LIVE)))
    runs = Runs(folder, limit_s=LIMIT_S)
    result = runs.run(folder_name(f"experts {ratio} live"), (*job, *given), (LLAMA, *layout))
    if not result:
        return [Row.at_most("runs that failed", 1, 0)]
    rows = []
    for rank, found in zip(LIVE, result["live"], strict=True):
        real = statistics.median(peaks[rank])
        between = (max(peaks[rank]) / min(peaks[rank]) - 1) * 100
        live = found["peak_bytes"]
        off = abs(live / real - 1) * 100
        beyond = max(live / max(peaks[rank]) - 1, 1 - live / min(peaks[rank]), 0) * 100
        rows += [
            Row.told(f"rank {rank}: peak memory of real ones, median", real / 2**20, "MiB"),
            Row.told(f"rank {rank}: real ones differ by", between, "%"),
            Row.told(f"rank {rank}: live beyond what real ones had by", beyond, "%"),
            Row.at_most(
                f"rank {rank}: peak memory, live against real", off, LARGEST_DIFFERENCE, "%"
            ),
        ]
    return rows


def steps(folder: Path) -> list[Row]:
    """Steps of eight real ranks with a share of a core each, and of two live ones with the same
    shares, in turn."""
    rows = []
    with TemporaryDirectory(dir=folder) as name, Box(BOX) as box:
        made = Path(name)
        links = made / "links"
        links.mkdir()
        cluster = measure_cluster(box, links)
        for ratio in RATIOS:
            layout = ("--model", "tiny-moe", "--ep", "4", "--force-balance", f"{ratio:g}")
            out = made / f"balance-{ratio:g}"
            out.mkdir()
            case = CaseInBox(
                box=box,
                args=(*layout, "--batch-size", f"{BATCH}", "--steps", "100000"),
                live=LIVE,
                cluster=cluster,
                folder=out,
                plan=TURNS,
            )
            rows += _rows_of_steps(f"balance ratio {ratio:g}", case)
    return rows


def _rows_of_steps(name: str, case: CaseInBox) -> list[Row]:
    seen = case.run(case.capture())
    real = float(np.median(seen.real_ns))
    rows = [
        Row.told(f"{name}: real step, median", real / 1e6, "ms"),
        Row.told(f"{name}: real blocks of steps differ by", TURNS.spread(seen.real_ns), "%"),
    ]
    for rank, watched in seen.live.items():
        off = abs(float(np.median(watched.step_ns)) / real - 1) * 100
        waited = float(np.sum(watched.wait_ns) / np.sum(watched.step_ns))
        rows += [
            Row.told(f"{name}: rank {rank}: live, share of waiting", waited * 100, "%"),
            Row.at_most(f"{name}: rank {rank}: step, live against real", off, STEP_BAR, "%"),
        ]
    return rows
