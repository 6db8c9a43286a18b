"""A device that is slow: what it does to a job of real ranks, and to live ones that are told so.

Published for a GPU at 900 MHz: 5.63 -> 6.38 s really, 5.70 -> 6.40 s emulated (PrismLLM)."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from prismscale.measure.collectives import measure_collectives
from prismscale.validation.rows import Row
from real_layouts import LIMIT_S, under_torchrun
from runs import HERE, Runs, folder_name

PROGRAM = HERE / "programs" / "slow_device.py"
MARKER = "injured_marker:step_ends"
RANKS, SLOW_RANK, FACTOR = 2, 1, 1.3
"""As many ranks as cores."""
LIVE = (0, SLOW_RANK)
"""A rank that waits for the slow one, and the slow one: each against the other, replayed."""
BAR = 2.0
"""Percent of the real step."""
WARM_UP = 5
TURNS = 5
"""Real jobs and emulated ones in turn, medians compared: alike jobs of this machine differ by up to
5 %."""


def measure(folder: Path) -> list[Row]:
    """Steps of both jobs, with and without."""
    rows: list[Row] = []
    rise: dict[int, list[tuple[float, float]]] = {}
    cluster = folder / "here.toml"
    if not cluster.exists():
        measure_collectives(out=cluster, world_size=RANKS)
    for name, slow in (("as recorded", ()), ("one device slow", (SLOW_RANK, FACTOR))):
        turns = [_turn(folder, cluster, f"{name} {turn}", slow) for turn in range(TURNS)]
        if not all(turns):
            return [*rows, Row.at_most("runs that failed", 1, 0)]
        for index, rank in enumerate(LIVE):
            reals, lives = zip(*(turn[index] for turn in turns), strict=True)
            real, live = statistics.median(reals), statistics.median(lives)
            between = (max(reals) / min(reals) - 1) * 100
            rows += [
                Row.told(f"{name}: step of real rank {rank}", real * 1e3, "ms"),
                Row.told(f"{name}: rank {rank}, real ones differ by", between, "%"),
                Row.told(f"{name}: step of live rank {rank}", live * 1e3, "ms"),
                Row.at_most(f"{name}: rank {rank}, live against real", _off(live, real), BAR, "%"),
            ]
            rise.setdefault(rank, []).append((real, live))
    for rank, ((real, live), (slow_real, slow_live)) in rise.items():
        rows += [
            Row.told(
                f"rank {rank}: what the slow device adds, real", (slow_real / real - 1) * 100, "%"
            ),
            Row.told(f"rank {rank}: the same, live", (slow_live / live - 1) * 100, "%"),
        ]
    return rows


def _turn(
    folder: Path, cluster: Path, name: str, slow: tuple[float, ...]
) -> list[tuple[float, float]]:
    """Median steps of one real job and one emulated one, of each live rank, in s; none if it
    failed."""
    really = folder / folder_name(f"slow device {name} real")
    really.mkdir(exist_ok=True)
    under_torchrun(RANKS, (PROGRAM, really, *slow))
    steps = []
    for rank in LIVE:
        out = folder_name(f"slow device {name} live {rank}")
        result = _live(folder, cluster, out, rank, slow)
        if not result:
            return []
        (live,) = result["live"]
        steps.append((_median_s(really / f"steps-{rank}"), live["median_step_ns"] / 1e9))
    return steps


def _live(
    folder: Path, cluster: Path, out: str, rank: int, slow: tuple[float, ...]
) -> dict[str, Any]:
    options = ("--world-size", RANKS, "--cluster", cluster, "--samples", 10, "--steps", 20)
    live = ("--live", rank, "--no-memory", "--step-marker", MARKER)
    factor = ("--slow", f"{SLOW_RANK}={FACTOR}") if slow else ()
    return Runs(folder, limit_s=LIMIT_S).run(out, (*options, *live, *factor), (PROGRAM, folder))


def _median_s(path: Path) -> float:
    return statistics.median(map(float, path.read_text().splitlines()[WARM_UP:]))


def _off(found: float, real: float) -> float:
    return abs(found / real - 1) * 100
