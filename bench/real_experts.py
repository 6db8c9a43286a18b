"""Memory of experts that get more or fewer rows: real ranks beside live ones.

The four ranks that share experts are there twice: a rank and the one four further do the same.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from allocations import build_counter
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
        off = abs(found["peak_bytes"] / real - 1) * 100
        rows += [
            Row.told(f"rank {rank}: peak memory of real ones, median", real / 2**20, "MiB"),
            Row.told(f"rank {rank}: real ones differ by", between, "%"),
            Row.at_most(
                f"rank {rank}: peak memory, live against real", off, LARGEST_DIFFERENCE, "%"
            ),
        ]
    return rows
