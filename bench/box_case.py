"""A job on the machines of a cluster in a box: captured, really run, and with live ranks.

The real job and the live ranks take turns, a block of steps each; who is not on turn uses no core.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from box import INTERFACE, Box
from box_job import run_ranks
from keeper import Keeper
from live_job import observe
from prismscale.api import Run, load, perform
from prismscale.config import JobConfig
from prismscale.emulation.script import Script
from runs import EXAMPLES, HERE
from starters import Prefixed

EXAMPLE = EXAMPLES / "llama" / "train.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How many steps, and whose turn it is."""

    block: int
    """Steps of the real job, then of the emulated one, without a pause."""
    rounds: int
    """Blocks of either."""

    @property
    def steps(self) -> int:
        """Of the real job, and of the emulated one."""
        return self.block * self.rounds

    def spread(self, steps_ns: Sequence[float]) -> float:
        """How much the medians of the blocks of ``steps_ns`` differ, in % of the smallest."""
        medians = [np.median(block) for block in np.array_split(steps_ns, self.rounds)]
        return float(100 * (max(medians) / min(medians) - 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What a live rank took, step by step."""

    step_ns: Sequence[float]
    wait_ns: Sequence[int]
    """Waiting for communications."""
    lag_ns: Sequence[int]
    """What emulation cost, which is not in its steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What the real job and the live ranks took."""

    real_ns: Sequence[float]
    """Step by step."""
    live: Mapping[int, Watched]
    """By rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseInBox:
    """One parallelism at one world size."""

    box: Box
    args: tuple[str, ...]
    live: tuple[int, ...]
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
        keeper = Keeper(
            self.gate, {"real": self.world_size, "live": len(self.live)}, steps=self.plan.block
        )
        pool = ThreadPoolExecutor(1)
        real = pool.submit(self._run_real, captured)
        # A job that failed takes no more turns.
        real.add_done_callback(lambda done: keeper.close() if done.exception() else None)
        try:
            live = self._run_live()
            return Observed(real_ns=real.result(), live=live)
        finally:
            pool.shutdown(wait=False)

    def _run_real(self, captured: Run) -> list[float]:
        """Steps of the real job, in ns: the mean over ranks."""
        facts = captured.trace(self.live[0]).facts
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

    def _run_live(self) -> dict[int, Watched]:
        """What each rank saw, live among virtual ranks: in the same run folder, whose captures are
        used again."""
        starter = Prefixed(
            lambda slot: self.box.prefix(self.live[slot]), gate=self.gate, slots=self.world_size
        )
        found = observe(replace(self.job, live=self.live, steps=self.plan.steps), starter)
        return {
            seen.rank: Watched(
                step_ns=np.diff(seen.step_end_ns).tolist(),
                wait_ns=seen.step_wait_ns[1:],
                lag_ns=seen.step_lag_ns[1:],
            )
            for seen in found
        }

    @property
    def gate(self) -> Path:
        """Socket of the keeper."""
        return self.folder / "gate"

    @property
    def world_size(self) -> int:
        """Machines of the box."""
        return self.box.spec.machines
