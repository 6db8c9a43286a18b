"""A layout of ranks, really run over gloo, in a few slots, and two live ranks at a time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prismscale.graph.io import load_trace
from prismscale.graph.node import CollectiveOp
from prismscale.graph.trace import RankTrace
from prismscale.validation.rows import Row
from runs import EXAMPLES, HERE, Runs, folder_name

FOLLOWED = HERE / "programs" / "followed.py"
OVERHEARD = HERE / "programs" / "overheard.py"
LLAMA = EXAMPLES / "llama" / "train.py"
STEPS = 20
SAMPLES = STEPS - 2
"""Two steps come before those that are sampled."""
HELD = STEPS - 1
"""The step that a trace of a run with real values holds: the last, counted from 0."""
BYTES = 4
"""Which column of :func:`_said` they are."""
SLOTS = 2
LIVE = 2
LARGEST_DIFFERENCE = 1e-6
"""Relative, fp32: sums in another order."""
LIMIT_S = 1500


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Of an example."""

    name: str
    args: tuple[str, ...] = ()
    script: Path = LLAMA
    world_size: int = 8

    @property
    def program(self) -> tuple[object, ...]:
        """The command, which takes all steps that are compared."""
        return (self.script, *self.args, "--steps", STEPS + 1)

    @property
    def job(self) -> tuple[object, ...]:
        """Options of its runs."""
        fixed = ("--cluster", "loopback-gloo", "--no-memory", "--samples", SAMPLES)
        return ("--world-size", self.world_size, *fixed)


LAYOUTS = (
    Layout(name="DDP", script=EXAMPLES / "ddp" / "train.py"),
    Layout(name="FSDP2", args=("--dp-mode", "fsdp2", "--clip-grad", "1.0")),
    Layout(
        name="TP 2 x PP 2 x FSDP2",
        args=("--tp", "2", "--pp", "2", "--microbatches", "4", "--clip-grad", "1.0"),
    ),
    Layout(name="experts, EP 4", args=("--experts", "8", "--ep", "4", "--clip-grad", "1.0")),
)


@dataclass(frozen=True, kw_only=True)
class Told:
    """Folders of what a layout's ranks noted, by how they ran, and of its runs."""

    layout: Layout
    folder: Path

    def of(self, kind: str) -> Path:
        """An empty folder, or that which was filled before."""
        path = self.folder / folder_name(f"{self.layout.name} {kind}")
        path.mkdir(exist_ok=True)
        return path

    @property
    def runs(self) -> Runs:
        """Of ``prismscale run``."""
        return Runs(self.folder, limit_s=LIMIT_S)

    def name(self, kind: str) -> str:
        """Of a run's folder."""
        return folder_name(f"{self.layout.name} run {kind}")


def measure(layout: Layout, folder: Path) -> list[Row]:
    """A real run, all ranks in slots, ranks alone, and pairs of live ranks."""
    told = Told(layout=layout, folder=folder)
    really, seen = told.of("real"), told.of("seen")
    following = (FOLLOWED, really, *layout.program)
    under_torchrun(layout.world_size, (OVERHEARD, really, *following))
    record = ("--values", "real", "--slots", SLOTS, "--record", "all")
    result = told.runs.run(
        told.name("slots"), (*layout.job, *record), (FOLLOWED, seen, *layout.program)
    )
    alone = told.runs.run(told.name("alone"), layout.job, layout.program)
    if not (result and alone):
        return [Row.at_most("runs that failed", 1, 0)]
    ranks = range(layout.world_size)
    worst = max(difference(really, seen, rank) for rank in ranks)
    slots = folder / told.name("slots")
    title = f"{layout.world_size} ranks, {STEPS - 1} steps: parameters, largest relative difference"
    return [
        Row.at_most(f"{SLOTS} slots, {title}", worst, LARGEST_DIFFERENCE),
        *_live_rows(told, record, title),
        *_heard_rows(really, [*traces(slots)]),
        *_alone_rows(folder / told.name("alone"), slots),
        Row.told("switches a rank and step", result["switched"]["switches"] / len(ranks) / STEPS),
    ]


def _live_rows(told: Told, record: tuple[object, ...], title: str) -> list[Row]:
    """Every pair of ranks in turn hears the recording, and communicates for real."""
    layout, seen, live = told.layout, told.of("seen"), told.of("live")
    made = total = 0
    for first in range(0, layout.world_size, LIVE):
        # Captures and recordings are those of the first run.
        (told.folder / told.name("slots") / "results.json").unlink(missing_ok=True)
        ranks = range(first, first + LIVE)
        given = ("--live", ",".join(map(str, ranks)), "--transfers", "real", "--steps", SAMPLES)
        options = (*layout.job, *record, *given)
        script = (FOLLOWED, seen, *layout.program)
        result = told.runs.run(told.name("slots"), options, script)
        if not result:
            return [Row.at_most("runs of live ranks that failed", 1, 0)]
        for rank, found in zip(ranks, result["live"], strict=True):
            shutil.copy(seen / f"rank-{rank}.jsonl", live)
            made += found["moved"]["communications"] - found["moved"]["defined"]
            total += found["moved"]["communications"]
    really = told.of("real")
    worst = max(difference(really, live, rank) for rank in range(layout.world_size))
    return [
        Row.at_most(f"{LIVE} live, recorded payloads, {title}", worst, LARGEST_DIFFERENCE),
        Row.at_most(f"{LIVE} live: communications with made-up values", made, 0),
        Row.told(f"{LIVE} live: communications really made", total),
    ]


def under_torchrun(
    world_size: int, command: tuple[object, ...], extra: Mapping[str, str] = MappingProxyType({})
) -> None:
    """All ranks for real, with ``extra`` variables."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world_size)
    done = subprocess.run(
        [sys.executable, *map(str, (*start, *command))],
        env={**os.environ, "OMP_NUM_THREADS": "1", **extra},
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"torchrun {' '.join(map(str, command))}\n{done.stderr[-3000:]}")


def difference(really: Path, otherwise: Path, rank: int) -> float:
    """Of what a rank's parameters came to, over all steps that both have."""
    real, other = (lines(folder / f"rank-{rank}.jsonl") for folder in (really, otherwise))
    if min(len(real), len(other)) < STEPS - 1:
        return float("inf")
    pairs = (pair for a, b in zip(real, other, strict=False) for pair in zip(a, b, strict=True))
    return max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in pairs)


def lines(path: Path) -> list[Any]:
    """What a rank noted, a line a step."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def traces(run: Path) -> Iterator[RankTrace]:
    """Of all ranks whose trace lies in a run's folder."""
    for path in sorted(run.glob("captures/*/rank-*.parquet")):
        yield load_trace(path)


def _heard_rows(really: Path, captured: Sequence[RankTrace]) -> list[Row]:
    """Ranks whose trace says other things than later steps of the real run, each of them. A trace
    holds one step: what is of other bytes in each, because values decide, is told apart."""
    every, held = 0, 0
    for trace in captured:
        own = _communications(trace)
        steps = lines(really / f"heard-{trace.rank}.jsonl")[2:]
        every += any(step != own for step in steps)
        held += not _agrees(own, steps)
    return [
        Row.at_most("ranks whose steps in slots differ from those of the real run", every, 0),
        Row.told("of which in the step that the trace holds, or in more than bytes", held),
    ]


def _agrees(own: list[list[object]], steps: list[list[list[object]]]) -> bool:
    if any(len(step) != len(own) for step in steps) or steps[HELD - 2] != own:
        return False
    return all(
        said[:-1] == ours[:-1] for step in steps for said, ours in zip(step, own, strict=True)
    )


def _communications(trace: RankTrace) -> list[list[object]]:
    """Of the steady step, as ``programs/overheard.py`` notes them."""
    found = []
    for node in range(trace.n_prologue, trace.n_nodes):
        if not trace.communicates_N[node]:
            continue
        op, ranks = CollectiveOp(trace.op_N[node]), trace.groups[trace.group_index_N[node]].ranks
        peer = int(trace.peer_N[node])
        if op.is_p2p:
            peer = (ranks.index(trace.rank) + peer) % len(ranks)
        found.append([op.spelling, list(ranks), peer, int(trace.bytes_N[node])])
    return found


def _alone_rows(alone: Path, switched: Path) -> list[Row]:
    """Ranks captured alone whose steady step says other things than with real values. How many
    rows an expert gets is nothing that a rank alone can know: what differs in that only is told."""
    pairs = []
    for trace in traces(alone):
        (twin,) = switched.glob(f"captures/*/rank-{trace.rank}.parquet")
        pairs.append((_said(trace), _said(load_trace(twin))))
    unequal = [(a, b) for a, b in pairs if a != b]
    shaped = [[(*node[:BYTES], node[-1]) for node in a] for pair in unequal for a in pair]
    others = sum(a != b for a, b in zip(shaped[::2], shaped[1::2], strict=True))
    return [
        Row.at_most("ranks whose steps in slots differ from those of ranks alone", len(unequal), 0),
        Row.told("of which in more than how many bytes a message has", others),
    ]


def _said(trace: RankTrace) -> list[tuple[object, ...]]:
    """Each node of the steady step: kind, operation, group, peer, bytes that must agree, edges."""
    steady = slice(trace.n_prologue, None)
    starts = trace.pred_start_N1[trace.n_prologue :].tolist()
    edges = [tuple(trace.pred_distance_P[a:b].tolist()) for a, b in pairwise(starts)]
    columns = (trace.kind_N, trace.op_N, trace.group_index_N, trace.peer_N, trace.bytes_N)
    return list(zip(*(column[steady].tolist() for column in columns), edges, strict=True))
