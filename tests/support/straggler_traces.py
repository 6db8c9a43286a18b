"""Small straggler traces of known own times: two stages and microbatches, a hidden barrier."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FORWARD = 0.080
TRANSFER = 0.002
COLLECTIVE = {
    "params-all-gather": 0.010,
    "embedding-grads-all-reduce": 0.005,
    "grads-reduce-scatter": 0.012,
    "optimizer-clip-main-grad": 0.003,
}
LOSS_BARRIER = 0.001


@dataclass(kw_only=True)
class Worker:
    """Writes down what one worker does, one operation after another."""

    dp: int
    stage: int
    step: int
    now: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)

    def does(self, optype: str, until: float, microbatch: int = -1, also: str = "") -> None:
        """One operation (and one more at the same time) from now to ``until``."""
        for label in filter(None, (optype, also)):
            sequence = self.seen.setdefault(label, 0)
            self.seen[label] += 1
            self.rows.append(
                {
                    "dp_rank": self.dp,
                    "stage": self.stage,
                    "step": self.step,
                    "optype": label,
                    "start_ts": self.now,
                    "duration": until - self.now,
                    "seq_id": sequence,
                    "mb_id": microbatch,
                }
            )
        self.now = until

    def computes(self, optype: str, seconds: float, microbatch: int = -1) -> None:
        """A computation of this length."""
        self.does(optype, self.now + seconds, microbatch)


def meet(workers: list[Worker], optype: str, seconds: float) -> None:
    """A communication: starts when the last one comes; everybody waits inside it."""
    end = max(w.now for w in workers) + seconds
    for worker in workers:
        worker.does(optype, end)


def exchange(a: Worker, b: Worker, sent: str | None = None, returned: str | None = None) -> None:
    """Point-to-point between neighbouring stages: a forward message, a backward one, or both."""
    end = max(a.now, b.now) + TRANSFER
    of_a = [f"{sent}-send"] * bool(sent) + [f"{returned}-recv"] * bool(returned)
    of_b = [f"{sent}-recv"] * bool(sent) + [f"{returned}-send"] * bool(returned)
    a.does(of_a[0], end, also=of_a[1] if len(of_a) > 1 else "")
    b.does(of_b[0], end, also=of_b[1] if len(of_b) > 1 else "")


def make_rows(steps: int = 6, replicas: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    """The rows of a trace; each microbatch of each replica has a length of its own."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for step in range(10, 10 + steps):
        length = rng.uniform(0.5, 2.0, (replicas, 2))
        grid = [
            [Worker(dp=d, stage=s, step=step, now=rng.uniform(0, 0.004)) for d in range(replicas)]
            for s in range(2)
        ]
        _run_step(grid, length)
        rows += [row for stage in grid for worker in stage for row in worker.rows]
    return rows


def _run_step(grid: list[list[Worker]], length: np.ndarray) -> None:
    for stage in grid:
        meet(stage, "params-all-gather", COLLECTIVE["params-all-gather"])
    for d, (a, b) in enumerate(zip(*grid, strict=True)):
        first, second = length[d]
        a.now += 0.016
        a.computes("forward-compute", FORWARD * first, 0)
        exchange(a, b, "forward")
        a.computes("forward-compute", FORWARD * second, 1)
        b.computes("forward-compute", FORWARD * first, 0)
        b.computes("backward-compute", 2 * FORWARD * first, 0)
        exchange(a, b, "forward", "backward")
        a.computes("backward-compute", 2 * FORWARD * first, 0)
        b.computes("forward-compute", FORWARD * second, 1)
        b.computes("backward-compute", 2 * FORWARD * second, 1)
        exchange(a, b, returned="backward")
        a.computes("backward-compute", 2 * FORWARD * second, 1)
    together = max(w.now for w in grid[1]) + LOSS_BARRIER
    for worker in grid[1]:
        worker.now = together
    for stage in grid:
        for worker in stage:
            worker.computes("layernorm-grads-all-reduce", 0.0001)
    for pair in zip(*grid, strict=True):
        meet(list(pair), "embedding-grads-all-reduce", COLLECTIVE["embedding-grads-all-reduce"])
    for stage in grid:
        meet(stage, "grads-reduce-scatter", COLLECTIVE["grads-reduce-scatter"])
    everybody = [worker for stage in grid for worker in stage]
    meet(everybody, "optimizer-clip-main-grad", COLLECTIVE["optimizer-clip-main-grad"])
    for worker in everybody:
        worker.computes("optimizer", 0.004)


def write(rows: list[dict[str, Any]], path: Path) -> Path:
    """Write rows as a straggler trace."""
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path
