"""All ranks of a job in a few slots, with real values, against the same job really run over gloo.

    python bench/real_values.py [--case NAME]… [--json PATH]

Each case runs an example twice on this machine, unmodified: under ``torchrun`` with as many
processes as ranks, and through ``prismscale run --values real`` in two slots. After every optimizer
step ``programs/followed.py`` notes what each rank's parameters came to, so that whatever a rank
hears from others shows one step later. How many bytes each rank says to whom, and in which order,
is compared with what ``prismscale run`` records of ranks that run alone. Times are no figures here:
processes share the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from prismscale.graph.io import load_trace
from prismscale.graph.trace import RankTrace
from prismscale.validation.rows import Row, finish
from runs import EXAMPLES, HERE, Runs

FOLLOWED = HERE / "programs" / "followed.py"
LLAMA = EXAMPLES / "llama" / "train.py"
STEPS = 20
SAMPLES = STEPS - 2
"""Two steps come before those that are sampled."""
SLOTS = 2
LARGEST_DIFFERENCE = 1e-6
"""Relative, fp32: sums in another order."""
LIMIT_S = 1500


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout of the llama example, or another script."""

    name: str
    world_size: int
    args: tuple[str, ...]
    script: Path = LLAMA


CASES = (
    Case(name="DDP", world_size=8, args=(), script=EXAMPLES / "ddp" / "train.py"),
    Case(name="FSDP2", world_size=8, args=("--dp-mode", "fsdp2", "--clip-grad", "1.0")),
    Case(
        name="TP 2 x PP 2 x FSDP2",
        world_size=8,
        args=("--tp", "2", "--pp", "2", "--microbatches", "4", "--clip-grad", "1.0"),
    ),
    Case(
        name="experts, EP 4",
        world_size=8,
        args=("--experts", "8", "--ep", "4", "--clip-grad", "1.0"),
    ),
)


def measure(case: Case, folder: Path) -> list[Row]:
    """Run one case both ways."""
    name = case.name.replace(" ", "-").replace(",", "")
    really, switched = folder / f"{name}-real", folder / f"{name}-switched"
    for out in (really, switched):
        out.mkdir()
    program = (case.script, *case.args, "--steps", STEPS + 1)
    under_torchrun(case, (FOLLOWED, really, *program))
    runs = Runs(folder, limit_s=LIMIT_S)
    job = ("--world-size", case.world_size, "--cluster", "loopback-gloo", "--no-memory")
    real = ("--values", "real", "--slots", SLOTS, "--samples", SAMPLES)
    result = runs.run(f"{name}-run", (*job, *real), (FOLLOWED, switched, *program))
    alone = runs.run(f"{name}-alone", job, program)
    if not (result and alone):
        return [Row.at_most(f"{case.name}: runs that failed", 1, 0)]
    ranks = range(case.world_size)
    worst = max(difference(really, switched, rank) for rank in ranks)
    unequal = [*_unequal(folder / f"{name}-alone", folder / f"{name}-run")]
    switches = result["switched"]["switches"]
    return [
        Row.at_most(
            f"{case.name}: parameters of {case.world_size} ranks, {STEPS - 1} steps, "
            "largest relative difference",
            worst,
            LARGEST_DIFFERENCE,
        ),
        Row.at_most(f"{case.name}: ranks whose steps differ from those alone", len(unequal), 0),
        Row.told(f"{case.name}: switches a rank and step", switches / len(ranks) / STEPS),
    ]


def under_torchrun(case: Case, command: tuple[object, ...]) -> None:
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", case.world_size)
    subprocess.run(
        [sys.executable, *map(str, (*start, *command))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=LIMIT_S,
        capture_output=True,
        check=True,
    )


def difference(really: Path, switched: Path, rank: int) -> float:
    """Of what a rank's parameters came to, over all steps that both have."""
    real, other = (_steps(folder, rank) for folder in (really, switched))
    if min(len(real), len(other)) < STEPS - 1:
        return float("inf")
    pairs = (pair for a, b in zip(real, other, strict=False) for pair in zip(a, b, strict=True))
    return max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in pairs)


def _steps(folder: Path, rank: int) -> list[list[float]]:
    return [json.loads(line) for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines()]


def _unequal(alone: Path, switched: Path) -> Iterator[int]:
    """Ranks captured alone whose steady step says other things than with real values."""
    for path in sorted(alone.glob("captures/*/rank-*.parquet")):
        (twin,) = switched.glob(f"captures/*/{path.name}")
        if _said(load_trace(path)) != _said(load_trace(twin)):
            yield int(path.stem.partition("-")[2])


def _said(trace: RankTrace) -> list[tuple[object, ...]]:
    """Each node of the steady step: kind, operation, group, peer, bytes that must agree, edges."""
    steady = slice(trace.n_prologue, None)
    starts = trace.pred_start_N1[trace.n_prologue :].tolist()
    edges = [tuple(trace.pred_distance_P[a:b].tolist()) for a, b in pairwise(starts)]
    columns = (trace.kind_N, trace.op_N, trace.group_index_N, trace.peer_N, trace.bytes_N)
    return list(zip(*(column[steady].tolist() for column in columns), edges, strict=True))


def main() -> int:
    """Print the table, and write it where asked; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument("--case", action="append", choices=names)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if options.case is None or case.name in options.case:
                rows += measure(case, Path(folder))
    return finish(rows, title="Real values", json_path=options.json)


if __name__ == "__main__":
    sys.exit(main())
