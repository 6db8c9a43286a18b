"""Emulated against real: 2 gloo ranks beside 1 live + 1 virtual, step by step in one run.

For each parallelism of the llama example: capture both ranks; then run, on the same two cores and
a few steps at a time in turn, (a) the real two-rank job, (b) rank 0 and rank 1 side by side, each
live against its own virtual peer, and (c) the same real job a second time. A real step lasts until
the last of its ranks has ended: a pipeline's last stage ends earlier. A turn has several steps,
because a real rank that ends late makes the other one late only at their next communication; held
after every step, both would wait there as well.

Each live rank's step is a step of its job. It is compared with the same step of the real turn
before it and of the one after it, because the machine's own speed changes within seconds, and over
several launches, because two processes of one program differ by per cents. The error is the median
of these ratios: jobs that are alike have one of 0 whatever their steps' distribution, which a mean
of several steps on one side would not give. Steps of a turn are not independent of each other, so
the interval is drawn from turns. How (c) differs from (a) is what this machine can resolve.

Peak memory is compared to the byte. A real rank's is counted in torch's allocator itself (see
``allocations.py``). It differs from launch to launch where gloo's threads still hold a buffer when
the program goes on: the smallest is what the program needs, and the number of real ranks that had
the live ranks' figure is told.

    python bench/fidelity_gloo.py --json out.json
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allocations import build_counter
from keeper import Keeper
from live_job import observe, with_captures_of
from prismscale.analysis.observation import Observation
from prismscale.api import load, perform
from prismscale.config import JobConfig
from prismscale.emulation.script import Script
from prismscale.measure.collectives import measure_collectives
from prismscale.processes.children import Children, ending
from prismscale.validation.rows import Row, finish
from real_job import RealJob
from starters import PinnedStarter, Prefixed, on_core

EXAMPLE = Path(__file__).parents[1] / "examples" / "llama" / "train.py"
CASES = {
    "DDP": ["--dp-mode", "ddp"],
    "FSDP2": ["--dp-mode", "fsdp2"],
    "TP 2": ["--tp", "2"],
    "PP 2": ["--pp", "2", "--microbatches", "4"],
}
WORLD = 2
MEDIAN_BAR = 2.0
CAPTURED_STEPS = 24
REAL_TEAMS = ("real", "again")
TEAMS = ("real", "live", "again")
"""In the order of their turns."""
TURN = 4
"""Steps of a turn."""
POLL_S = 0.25


@dataclass(kw_only=True)
class Figures:
    """What one team of ranks showed, over all launches."""

    steps_JS: list[NDArray[np.float64]] = field(default_factory=list)
    """By launch: durations in ns of steps ``S`` of the jobs ``J`` that the team's ranks show."""
    peak_bytes: list[list[int]] = field(default_factory=list)
    """By launch: each rank's peak."""
    lag_ns: list[int] = field(default_factory=list)

    def add(self, steps_JS: NDArray[np.float64], peak_bytes: list[int]) -> None:
        """One more launch."""
        self.steps_JS.append(steps_JS)
        self.peak_bytes.append(peak_bytes)

    def median_ms(self) -> float:
        """Median step."""
        return float(np.median(np.concatenate(self.steps_JS, axis=1))) / 1e6

    def peaks(self, of_launches: Callable[[Sequence[int]], int]) -> list[int]:
        """Each rank's peak, one figure for all launches."""
        return [of_launches(p) for p in zip(*self.peak_bytes, strict=True)]


def capture(args: Sequence[str], cluster: str, out: Path) -> JobConfig:
    """``prismscale run`` without live ranks, which gives each capture a core of its own."""
    config = JobConfig(
        script=Script(target=str(EXAMPLE), args=tuple(args)),
        world_size=WORLD,
        cluster=cluster,
        out=out,
        samples=CAPTURED_STEPS,
    )
    perform(config, starter=Prefixed(on_core))
    return config


def run_case(args: list[str], cluster: str, steps: int, launches: int) -> dict[str, Figures]:
    """Run one parallelism; returns what each team of processes showed."""
    figures = {team: Figures() for team in TEAMS}
    with tempfile.TemporaryDirectory(prefix="fidelity-") as name:
        for launch in range(launches):
            folder = Path(name) / f"launch-{launch}"
            folder.mkdir()
            turns = -(-steps // (launches * TURN))
            job = capture(args, cluster, folder / "captured")
            run_launch(job, turns * TURN, folder, figures)
    return figures


def run_launch(captured: JobConfig, steps: int, folder: Path, figures: dict[str, Figures]) -> None:
    """Fresh processes of every team, which take steps in turn; adds to ``figures``."""
    # A turn more than counted: the first one finds cold caches.
    steps += TURN
    keeper = Keeper(folder / "gate", dict.fromkeys(TEAMS, WORLD), steps=TURN)
    jobs = [RealJob(team=team, folder=folder) for team in REAL_TEAMS]
    specs = [real_spec(r, captured, folder, steps) for r in range(WORLD)]
    counter = build_counter(folder)
    with Children() as children, ThreadPoolExecutor(WORLD) as pool:
        for job in jobs:
            job.start(children, specs, counter)
        lives = [pool.submit(run_live, r, captured, folder, steps) for r in range(WORLD)]
        for live in lives:
            # Nobody takes turns with a job that failed.
            live.add_done_callback(lambda done: keeper.close() if done.exception() else None)
        while children.running or not all(live.done() for live in lives):
            for child in children.finished():
                if code := child.process.returncode:
                    keeper.close()
                    raise SystemExit(f"{child.name} {ending(code)}\n{child.log_tail()}")
            # Rarely: whoever is on turn has both cores.
            time.sleep(POLL_S)
        seen = [live.result() for live in lives]
    keeper.close()
    for job in jobs:
        real = [job.told(r) for r in range(WORLD)]
        figures[job.team].add(
            _of_one_job(_counted([r["step_ns"] for r in real])), [r["peak_bytes"] for r in real]
        )
    # Two jobs, each with one of its ranks live: that rank's period is the job's.
    periods = _counted([np.diff(live.step_end_ns)[:-TURN] for live in seen])
    figures["live"].add(periods, [live.peak_bytes for live in seen])
    figures["live"].lag_ns += [n for live in seen for n in live.step_lag_ns[:-TURN]]


def run_live(rank: int, captured: JobConfig, folder: Path, steps: int) -> Observation:
    """One live rank against its own virtual peer, on the same captures.

    It takes a turn more than the real jobs: what follows a live rank's end, the report too, would
    else take its part of the cores from the real job that has the last turn.
    """
    job = with_captures_of(captured, folder / f"live-{rank}")
    job = replace(job, live=(rank,), steps=steps + TURN)
    (seen,) = observe(job, PinnedStarter(rank, folder / "gate"))
    return seen


def _counted(step_ns: Sequence[Sequence[int] | NDArray[np.int64]]) -> NDArray[np.float64]:
    """Rank × step, without the first turn."""
    return np.array(step_ns, dtype=np.float64)[:, TURN:]


def _of_one_job(steps_RS: NDArray[np.float64]) -> NDArray[np.float64]:
    """One row: a job's steps, which end with the last of its ranks. Ranks begin a turn together."""
    ends_RTS = steps_RS.reshape(WORLD, -1, TURN).cumsum(axis=2)
    return np.diff(ends_RTS.max(axis=0), axis=1, prepend=0.0).reshape(1, -1)


def real_spec(rank: int, captured: JobConfig, folder: Path, steps: int) -> dict[str, Any]:
    """What a real rank is to do: as many steps, of the same program, as the live one."""
    facts = load(captured.out).trace(rank).facts
    return {
        "target": captured.script.target,
        "args": captured.script.args,
        "gate": str(folder / "gate"),
        "steps": steps,
        "period": facts.calls_per_step,
        "memory_marks": facts.calls_tracked,
        "prologue_marks": facts.calls_in_prologue,
    }


def ratios(steps_JS: NDArray[np.float64], real_JS: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn × pair: every job's step over every real job's, less one, in per cent."""
    pairs_JJS = 100 * (steps_JS[:, None] / real_JS[None] - 1)
    turns = pairs_JJS.shape[-1] // TURN
    return pairs_JJS.reshape(-1, turns, TURN).swapaxes(0, 1).reshape(turns, -1)


def median_of_turns(ratios_TP: NDArray[np.float64]) -> tuple[float, float, float]:
    """Median of all pairs, and its 95 % interval by drawing turns."""
    turns = len(ratios_TP)
    draws = np.random.default_rng(0).integers(0, turns, size=(2000, turns))
    low, high = np.percentile([np.median(ratios_TP[d]) for d in draws], [2.5, 97.5])
    return float(np.median(ratios_TP)), float(low), float(high)


def compare(case: str, figures: dict[str, Figures]) -> list[Row]:
    """Rows of one case: error of paired steps with its confidence interval, and memory."""
    real, live, again = (figures[team] for team in TEAMS)
    around = [np.concatenate(jobs) for jobs in zip(real.steps_JS, again.steps_JS, strict=True)]
    launches = [ratios(*steps) for steps in zip(live.steps_JS, around, strict=True)]
    error, low, high = median_of_turns(np.concatenate(launches))
    resolved = [ratios(*steps) for steps in zip(again.steps_JS, real.steps_JS, strict=True)]
    floor, floor_low, floor_high = median_of_turns(np.concatenate(resolved))
    print(
        f"{case}: {sum(s.shape[1] for s in live.steps_JS)} paired steps; median real "
        f"{real.median_ms():.1f} ms, live {live.median_ms():.1f} ms (lag "
        f"{np.median(live.lag_ns) / 1e6:.1f} ms); live against real {error:+.2f} % (95 %: "
        f"{low:+.2f} … {high:+.2f}); a second real job against the first {floor:+.2f} % "
        f"({floor_low:+.2f} … {floor_high:+.2f})"
    )
    by_launch = zip(launches, around, strict=True)
    each = [f"{np.median(p):+.2f} % of {np.median(a) / 1e6:.0f} ms" for p, a in by_launch]
    print(f"  by launch: {', '.join(each)}")
    print(f"  peaks by launch: real {real.peak_bytes + again.peak_bytes}, live {live.peak_bytes}")
    smallest = [min(a, b) for a, b in zip(real.peaks(min), again.peaks(min), strict=True)]
    emulated = live.peaks(median_low)
    difference = max(abs(a - b) for a, b in zip(smallest, emulated, strict=True))
    alike = np.mean([np.equal(p, emulated) for p in real.peak_bytes + again.peak_bytes])
    return [
        Row.at_most(f"{case}: paired step, live against real", abs(error), MEDIAN_BAR, "%"),
        Row.told(f"{case}: paired step, a second real job against the first", abs(floor), "%"),
        Row.at_most(f"{case}: peak memory, live against real", difference, 0, "bytes"),
        Row.told(f"{case}: real ranks with the live ranks' peak", 100 * float(alike), "%"),
    ]


def calibrated(folder: Path) -> str:
    """A cluster file of gloo as it is on this machine, as a user is told to make one."""
    path = folder / "here.toml"
    measure_collectives(out=path)
    return str(path)


def main() -> int:
    """Run the cases asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=320, help="paired steps")
    parser.add_argument(
        "--launches", type=int, default=4, help="captures and starts anew so many times"
    )
    parser.add_argument("--model", default="tiny")
    parser.add_argument(
        "--cluster", help="preset or file; default: gloo as calibrated here, before the first case"
    )
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="fidelity-") as folder:
        cluster = options.cluster or calibrated(Path(folder))
        for case in options.case or CASES:
            args = ["--model", options.model, "--steps", "100000", "--log-every", "1000"]
            args += CASES[case]
            rows += compare(case, run_case(args, cluster, options.steps, options.launches))
    return finish(rows, json_path=options.json)


if __name__ == "__main__":
    sys.exit(main())
