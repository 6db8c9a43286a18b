"""A program that decides by what it hears: really run, in slots, and with live ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

from prismscale.validation.rows import Row
from real_layouts import LIMIT_S, LIVE, SLOTS, lines, under_torchrun
from runs import HERE, Runs

BRANCHING = HERE / "programs" / "branching.py"
RANKS = 4
SAMPLES = 70
"""More than the program has steps: it stops by itself."""
STEPS = 6
"""Of live ranks, after those before the job repeats itself."""
JOB = ("--world-size", RANKS, "--cluster", "loopback-gloo", "--no-memory")
REAL = (*JOB, "--values", "real", "--slots", SLOTS, "--samples", SAMPLES, "--record", "all")


def measure(folder: Path) -> list[Row]:
    """Which decisions of a real run are taken otherwise."""
    really, seen, live = (folder / f"branches-{kind}" for kind in ("real", "seen", "live"))
    for out in (really, seen, live):
        out.mkdir(exist_ok=True)
    under_torchrun(RANKS, (BRANCHING, really))
    runs = Runs(folder, limit_s=LIMIT_S)
    if not runs.run("branches-run", REAL, (BRANCHING, seen)):
        return [Row.at_most("runs that failed", 1, 0)]
    steps = len(lines(really / "branches-0.jsonl"))
    others = sum(_told(really, rank) != _told(seen, rank) for rank in range(RANKS))
    mirrored = runs.command(  # may end with an error, which says so too
        "run", *JOB, "--payload", "mirror", "--out", folder / "branches-mirror", BRANCHING, live
    )
    decisions = [told for rank in range(RANKS) for told in _told(really, rank)]
    return [
        Row.told("steps of the real run until it stopped", steps),
        *(
            Row.told(f"of which on each rank, steps with {name}", sum(map(chosen, decisions)) / 4)
            for name, chosen in KINDS.items()
        ),
        Row.at_most(f"{SLOTS} slots: ranks that decided otherwise in any step", others, 0),
        *_live_rows(runs, really, seen, live),
        Row.at_least(
            "--payload mirror: warned that it may decide otherwise",
            float("may decide otherwise" in " ".join((mirrored.stdout + mirrored.stderr).split())),
            1,
        ),
    ]


KINDS = {
    "a skipped update": lambda told: told["skips"],
    "an early stop": lambda told: told["stops"],
}


def _live_rows(runs: Runs, really: Path, seen: Path, live: Path) -> list[Row]:
    """Each pair of ranks, live among recorded ones."""
    others, least = 0, SAMPLES
    for first in range(0, RANKS, LIVE):
        (runs.folder / "branches-run" / "results.json").unlink(missing_ok=True)
        ranks = range(first, first + LIVE)
        given = ("--live", ",".join(map(str, ranks)), "--transfers", "real", "--steps", STEPS)
        if not runs.run("branches-run", (*REAL, *given), (BRANCHING, seen)):
            return [Row.at_most("runs of live ranks that failed", 1, 0)]
        for rank in ranks:
            shutil.copy(seen / f"branches-{rank}.jsonl", live)
            told = _told(live, rank)
            least = min(least, len(told))
            others += told != _told(really, rank)[: len(told)]
    return [
        Row.at_most(f"{LIVE} live: ranks that decided otherwise in any step", others, 0),
        Row.at_least(f"{LIVE} live: steps that each took", least, STEPS),
    ]


def _told(folder: Path, rank: int) -> list[dict[str, object]]:
    return lines(folder / f"branches-{rank}.jsonl")
