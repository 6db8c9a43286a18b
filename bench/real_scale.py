"""Many logical ranks in two slots: how long, in how much memory, with how many switches."""

from __future__ import annotations

import os
import time
from pathlib import Path

from prismscale.validation.rows import Row
from real_layouts import LIMIT_S, LLAMA, SLOTS, traces
from runs import EXAMPLES, Runs
from switch_bound import fewest_switches

REAL = ("--cluster", "loopback-gloo", "--no-memory", "--values", "real", "--slots", SLOTS)
LLAMA_RANKS = 64
LLAMA_SAMPLES = 4
BEFORE = 2
"""Steps that come before those that are sampled."""
MOST_S = 600
MOST_BYTES = 12e9
MORE_SWITCHES = 1.5
SPILLED_RANKS = 32
HIDDEN, LAYERS, BATCH = 1024, 20, 512
STATE_BYTES = SPILLED_RANKS * 16 * (LAYERS + 1) * (HIDDEN + 1) * HIDDEN
"""Parameters, gradients and two moments, in fp32."""
BUDGET = "3.5GiB"
BUDGET_BYTES = int(3.5 * 2**30)
SLOWER = 2.0
WRITTEN_BYTES = 1 << 30


def llama(folder: Path) -> list[Row]:
    """The debug llama with 64 ranks, all of one group: the bound says little of groups that fit
    into the slots."""
    runs = Runs(folder, limit_s=LIMIT_S)
    script = (LLAMA, "--model", "debug", "--dp-mode", "fsdp2", "--steps", 100)
    job = ("--world-size", LLAMA_RANKS, "--samples", LLAMA_SAMPLES)
    began = time.monotonic()
    result = runs.run("llama", (*job, *REAL), script)
    took_s = time.monotonic() - began
    if not result:
        return [Row.at_most("runs that failed", 1, 0)]
    found = [*traces(folder / "llama")]
    facts = found[0].facts
    steps = (LLAMA_SAMPLES + BEFORE - facts.calls_in_prologue) // facts.calls_per_step
    least = fewest_switches(found, SLOTS, steps)
    switches = result["switched"]["switches"]
    return [
        Row.at_most("the whole command", took_s, MOST_S, "s"),
        Row.at_most("memory of all processes", result["peak_rss_bytes"], MOST_BYTES, "B"),
        Row.told("switches", switches),
        Row.told("of which any order needs", least),
        Row.at_most("switches over those that any order needs", switches / least, MORE_SWITCHES),
    ]


def spilled(folder: Path) -> list[Row]:
    """32 ranks whose state is three times the budget, and without one."""
    runs = Runs(folder, limit_s=LIMIT_S)
    job = ("--world-size", SPILLED_RANKS, "--samples", 1)
    layers = ("--hidden", HIDDEN, "--layers", LAYERS, "--batch-size", BATCH)
    script = (EXAMPLES / "ddp" / "train.py", *layers, "--steps", 100)
    free = runs.run("spilled-free", (*job, *REAL), script)
    within = runs.run("spilled-within", (*job, *REAL, "--memory", BUDGET), script)
    if not (free and within):
        return [Row.at_most("runs that failed", 1, 0)]
    return [
        Row.told("disk: written and forced out", _disk_mb_per_s(folder), "MB/s"),
        Row.told("state over the budget", STATE_BYTES / BUDGET_BYTES),
        Row.told("without a budget: memory of all processes", free["peak_rss_bytes"], "B"),
        Row.at_most(
            "memory of all processes over the budget", within["peak_rss_bytes"] / BUDGET_BYTES, 1.0
        ),
        Row.told("times that a rank was pressed out", within["switched"]["presses"]),
        Row.told("without a budget", free["wall_s"]["values"], "s"),
        Row.told("within the budget", within["wall_s"]["values"], "s"),
        Row.at_most(
            "time within the budget over without one",
            within["wall_s"]["values"] / free["wall_s"]["values"],
            SLOWER,
        ),
    ]


def _disk_mb_per_s(folder: Path) -> float:
    """What the disk takes that holds the runs."""
    block = os.urandom(1 << 24)
    path = folder / "written"
    began = time.monotonic()
    with path.open("wb") as file:
        for _ in range(WRITTEN_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    took_s = time.monotonic() - began
    path.unlink()
    return WRITTEN_BYTES / 1e6 / took_s
