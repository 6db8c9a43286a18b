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
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from box import INTERFACE, Box, BoxSpec
from box_job import run_ranks
from box_links import measure_cluster
from keeper import Keeper
from live_job import observe
from prismscale.analysis.observation import Observation
from prismscale.api import Run, load, perform
from prismscale.config import JobConfig
from prismscale.emulation.script import Script
from prismscale.errors import PrismscaleError
from prismscale.validation.rows import Row, finish, print_rows
from starters import Prefixed

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "llama" / "train.py"
JOB = ["--layers", "2", "--hidden", "128", "--ffn", "384", "--steps", "100000"]
"""Large enough that the wire takes much of a step, small enough for a fifth of a core."""
CASES = {
    "DDP": ["--dp-mode", "ddp"],
    "TP 2 × FSDP2": ["--tp", "2", "--dp-mode", "fsdp2"],
}
LIVE = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is run in every box."""

    model: str
    block: int
    """Steps of the real job, then of the emulated one, without a pause."""
    rounds: int
    """Blocks of either."""

    @property
    def steps(self) -> int:
        """Of the real job, and of the emulated one."""
        return self.block * self.rounds


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What the real job and the live rank took, step by step."""

    real_ns: Sequence[float]
    live_ns: Sequence[float]
    wait_ns: Sequence[int]
    """Of the live rank: waiting for communications."""
    lag_ns: Sequence[int]
    """Of the live rank: what emulation cost, which is not in its steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseInBox:
    """One parallelism at one world size."""

    box: Box
    args: tuple[str, ...]
    cluster: Path
    folder: Path
    plan: Plan

    @property
    def job(self) -> JobConfig:
        """The job, without live ranks."""
        return JobConfig(
            script=Script(target=str(EXAMPLE), args=self.args),
            world_size=self.world_size,
            cluster=str(self.cluster),
            out=self.folder / "run",
            samples=self.plan.block * 2,
        )

    def capture(self) -> Run:
        """Capture as ``prismscale run`` does, with the box's machines in place of cores: ranks side
        by side, then in slices of at most all machines. Machines that are left over run a copy of a
        rank meanwhile: every one is as busy as in the real job."""
        perform(self.job, starter=Prefixed(self._prefix, slots=self.world_size))
        return load(self.job.out)

    def _prefix(self, slot: int) -> list[str]:
        """Ranks of a slice find each other over their links."""
        return [*self.box.prefix(slot), "env", f"GLOO_SOCKET_IFNAME={INTERFACE}"]

    def run(self, captured: Run) -> Observed:
        """Run the real job and the emulated one in turns."""
        keeper = Keeper(self.gate, {"real": self.world_size, "live": 1}, steps=self.plan.block)
        pool = ThreadPoolExecutor(1)
        real = pool.submit(self._run_real, captured)
        # A job that failed takes no more turns.
        real.add_done_callback(lambda done: keeper.close() if done.exception() else None)
        try:
            live = self._run_live()
            return Observed(
                real_ns=real.result(),
                live_ns=np.diff(live.step_end_ns).tolist(),
                wait_ns=live.step_wait_ns[1:],
                lag_ns=live.step_lag_ns[1:],
            )
        finally:
            pool.shutdown(wait=False)

    def _run_real(self, captured: Run) -> list[float]:
        """Steps of the real job, in ns: the mean over ranks."""
        facts = captured.trace(LIVE).facts
        spec = {
            "target": str(EXAMPLE),
            "args": self.args,
            "gate": str(self.gate),
            "steps": self.plan.steps,
            "out": str(self.folder),
            "period": facts.calls_per_step,
            "memory_marks": facts.calls_tracked,
            "prologue_marks": facts.calls_in_prologue,
        }
        specs = [spec] * self.world_size
        run_ranks(self.box, "real", HERE / "real_rank.py", specs, self.folder)
        found = [
            json.loads((self.folder / f"real-{r}.json").read_text()) for r in range(self.world_size)
        ]
        return list(np.mean([f["step_ns"] for f in found], axis=0))

    def _run_live(self) -> Observation:
        """What rank 0 saw, live among virtual ranks: in the same run folder, whose captures are
        used again."""
        starter = Prefixed(
            lambda slot: self.box.prefix(LIVE), gate=self.gate, slots=self.world_size
        )
        return observe(replace(self.job, live=(LIVE,), steps=self.plan.steps), starter)

    @property
    def gate(self) -> Path:
        """Socket of the keeper."""
        return self.folder / "gate"

    @property
    def world_size(self) -> int:
        """Machines of the box."""
        return self.box.spec.machines


def compare(name: str, case: CaseInBox) -> list[Row]:
    """Rows of medians and their errors."""
    captured = case.capture()
    predicted = captured.step.ns
    seen = case.run(captured)
    real, live = float(np.median(seen.real_ns)), float(np.median(seen.live_ns))
    rows = [
        Row.told("real step, median", real / 1e6, "ms"),
        Row.told("real step, between blocks", _spread(seen.real_ns, case.plan), "%"),
        Row.told("simulated step", predicted / 1e6, "ms"),
        Row.told("simulated against real", 100 * (predicted / real - 1), "%"),
        Row.told("live step, median", live / 1e6, "ms"),
        Row.told("live step, between blocks", _spread(seen.live_ns, case.plan), "%"),
        Row.told("live against real", 100 * (live / real - 1), "%"),
        Row.told("live, waiting in a step", float(np.median(seen.wait_ns)) / 1e6, "ms"),
        Row.told("live, lag in a step", float(np.median(seen.lag_ns)) / 1e6, "ms"),
    ]
    rows = [replace(row, name=f"{name}: {row.name}") for row in rows]
    print_rows(rows, title=f"{name}: {len(seen.real_ns)} real steps, {len(seen.live_ns)} live")
    return rows


def _spread(steps_ns: Sequence[float], plan: Plan) -> float:
    """How much the blocks' medians differ, in % of the smallest."""
    medians = [np.median(b) for b in np.array_split(steps_ns, plan.rounds)]
    return float(100 * (max(medians) / min(medians) - 1))


def run_box(spec: BoxSpec, plan: Plan, cases: list[str]) -> list[Row]:
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
                args=("--model", plan.model, *JOB, "--log-every", "1000", *CASES[case]),
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
    plan = Plan(model=options.model, block=options.block, rounds=options.rounds)
    cores = len(os.sched_getaffinity(0))
    rows: list[Row] = []
    try:
        for ranks in options.ranks or (4, 8):
            share = min(1.0, options.busy * cores / ranks)
            spec = BoxSpec(machines=ranks, core_share=share, rate_mbit=options.rate)
            rows += run_box(spec, plan, options.case or list(CASES))
    except PrismscaleError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return finish(rows, title="Cluster in a box", json_path=options.json)


if __name__ == "__main__":
    sys.exit(main())
