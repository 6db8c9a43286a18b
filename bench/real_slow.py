"""A device that is slow: what it does to a job of real ranks, and to live ones that are told so.

Published for a GPU at 900 MHz: 5.63 -> 6.38 s really, 5.70 -> 6.40 s emulated (PrismLLM)."""

from __future__ import annotations

import statistics
from pathlib import Path

from prismscale.validation.rows import Row
from real_layouts import LIMIT_S, under_torchrun
from runs import HERE, Runs, folder_name

PROGRAM = HERE / "programs" / "slow_device.py"
MARKER = "injured_marker:step_ends"
RANKS, SLOW_RANK, FACTOR = 4, 1, 1.3
LIVE = (0, SLOW_RANK)
"""A rank that waits for the slow one, and the slow one."""
BAR = 2.0
"""Percent of the real step."""
WARM_UP = 5


def measure(folder: Path) -> list[Row]:
    """Steps of both jobs, with and without."""
    rows, rise = [], {}
    for name, slow in (("as recorded", ()), ("one device slow", (SLOW_RANK, FACTOR))):
        really = folder / folder_name(f"slow device {name}")
        really.mkdir(exist_ok=True)
        under_torchrun(RANKS, (PROGRAM, really, *slow))
        real_s = [_median_s(really / f"steps-{rank}") for rank in LIVE]
        result = _live(folder, slow)
        if not result:
            return [*rows, Row.at_most("runs that failed", 1, 0)]
        for rank, real, live in zip(LIVE, real_s, result["live"], strict=True):
            live_s = live["median_step_ns"] / 1e9
            rows += [
                Row.told(f"{name}: step of real rank {rank}", real * 1e3, "ms"),
                Row.told(f"{name}: step of live rank {rank}", live_s * 1e3, "ms"),
                Row.at_most(
                    f"{name}: rank {rank}, live against real", _off(live_s, real), BAR, "%"
                ),
            ]
            rise.setdefault(rank, []).append((real, live_s))
    for rank, ((real, live), (slow_real, slow_live)) in rise.items():
        rows += [
            Row.told(
                f"rank {rank}: what the slow device adds, real", (slow_real / real - 1) * 100, "%"
            ),
            Row.told(f"rank {rank}: the same, live", (slow_live / live - 1) * 100, "%"),
        ]
    return rows


def _live(folder: Path, slow: tuple[float, ...]) -> dict[str, object]:
    options = ("--world-size", RANKS, "--cluster", "loopback-gloo", "--samples", 10, "--steps", 20)
    live = ("--live", ",".join(map(str, LIVE)), "--no-memory", "--step-marker", MARKER)
    factor = ("--slow", f"{SLOW_RANK}={FACTOR}") if slow else ()
    out = folder_name(f"slow device live {len(slow)}")
    return Runs(folder, limit_s=LIMIT_S).run(out, (*options, *live, *factor), (PROGRAM, folder))


def _median_s(path: Path) -> float:
    return statistics.median(map(float, path.read_text().splitlines()[WARM_UP:]))


def _off(found: float, real: float) -> float:
    return abs(found / real - 1) * 100
