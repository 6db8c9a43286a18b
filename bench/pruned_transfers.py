"""Live ranks that really communicate, among assistants in the place of everybody else.

    python bench/pruned_transfers.py [--part values|bytes|start]… [--case NAME]… [--json PATH]

``values``: an example runs under ``torchrun`` with all its ranks over gloo; then two live ranks of
it at a time hear what the others said when all ranks ran in two slots (``--values real --record
all``), and communicate for real. What each rank's parameters come to after each optimizer step is
compared. ``bytes``: what gloo moves in a network namespace of its own (needs root) beside what
schedules say. ``start``: how long two live ranks of many take until they communicate, and what
memory assistants take. PATH keeps the rows of parts that a run leaves out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from prismscale.graph.node import CollectiveOp
from prismscale.transfers.schedule import Shape, sent_numel
from prismscale.validation.rows import Row, finish, read_rows, write_rows
from real_values import CASES, FOLLOWED, SLOTS, STEPS, Case, difference, under_torchrun
from runs import EXAMPLES, HERE, Runs

LARGEST_DIFFERENCE = 1e-6
"""Relative, fp32: sums in another order."""
LIMIT_S = 1500
LIVE = 2
START_S = 10.0
"""Of 8,192 ranks; 44.3 s are published (PrismLLM)."""
WORLDS = (64, 1024, 8192)
MOVED = HERE / "programs" / "gloo_bytes.py"
COUNTED = {
    "all_reduce": CollectiveOp.ALL_REDUCE,
    "reduce": CollectiveOp.REDUCE,
    "broadcast": CollectiveOp.BROADCAST,
    "all_gather": CollectiveOp.ALL_GATHER,
    "reduce_scatter": CollectiveOp.REDUCE_SCATTER,
    "all_to_all": CollectiveOp.ALL_TO_ALL,
    "gather": CollectiveOp.GATHER,
    "scatter": CollectiveOp.SCATTER,
}
NUMEL = 840_000
"""Divides by every group's size."""
MORE_BYTES = 2.0
"""Percent that headers, acknowledgements and barriers may add to what gloo counts."""


def value_rows(folder: Path, cases: Sequence[Case]) -> list[Row]:
    """Every layout."""
    return [row for case in cases for row in _values(case, folder)]


def _values(case: Case, folder: Path) -> list[Row]:
    name = case.name.replace(" ", "-").replace(",", "")
    really, seen, live = (folder / f"{name}-{kind}" for kind in ("real", "seen", "live"))
    for out in (really, seen, live):
        out.mkdir()
    program = (case.script, *case.args, "--steps", STEPS + 1)
    under_torchrun(case, (FOLLOWED, really, *program))
    steps = ("--samples", STEPS - 2, "--steps", STEPS - 2)
    job = ("--world-size", case.world_size, "--cluster", "loopback-gloo", "--no-memory", *steps)
    real = ("--values", "real", "--slots", SLOTS, "--record", "all", "--transfers", "real")
    runs = Runs(folder, limit_s=LIMIT_S)
    made = total = 0
    for first in range(0, case.world_size, LIVE):
        # Captures and recordings are those of the first run.
        (folder / f"{name}-run" / "results.json").unlink(missing_ok=True)
        ranks = range(first, first + LIVE)
        given = ("--live", ",".join(map(str, ranks)), *job, *real)
        result = runs.run(f"{name}-run", given, (FOLLOWED, seen, *program))
        if not result:
            return [Row.at_most(f"{case.name}: runs that failed", 1, 0)]
        for rank, told in zip(ranks, result["live"], strict=True):
            shutil.copy(seen / f"rank-{rank}.jsonl", live)
            made += told["moved"]["communications"] - told["moved"]["defined"]
            total += told["moved"]["communications"]
    worst = max(difference(really, live, rank) for rank in range(case.world_size))
    return [
        Row.at_most(
            f"{case.name}: parameters of {case.world_size} ranks, {STEPS - 1} steps, two live at a "
            "time, largest relative difference",
            worst,
            LARGEST_DIFFERENCE,
        ),
        Row.at_most(f"{case.name}: communications with made-up values", made, 0),
        Row.told(f"{case.name}: communications that live ranks really made", total),
    ]


def byte_rows(folder: Path, cases: Sequence[Case]) -> list[Row]:
    """gloo's own bytes, of all members together, over those of schedules."""
    del cases
    rows = []
    for size in (4, 5, 8):
        out = folder / f"bytes-{size}.json"
        command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        command += [sys.executable, str(MOVED), str(size), str(NUMEL), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-1000:], file=sys.stderr)
            return [Row.at_most("gloo's bytes: runs that failed", 1, 0)]
        counted = json.loads(out.read_text())
        for name, op in COUNTED.items():
            more = (counted[name] / _scheduled_bytes(op, size) - 1) * 100
            title = f"{name} of {size} members: bytes of gloo against schedules"
            rows.append(Row.at_most(title, abs(more), MORE_BYTES, "%"))
    return rows


def _scheduled_bytes(op: CollectiveOp, size: int) -> int:
    """Of all members together, in fp32."""
    part = NUMEL // size
    total = 0
    for member in range(size):
        numel = part if op in (CollectiveOp.GATHER, CollectiveOp.SCATTER) else NUMEL
        splits = (part,) * size
        gives = op is CollectiveOp.ALL_TO_ALL or (op is CollectiveOp.SCATTER and member == 0)
        takes = op is CollectiveOp.ALL_TO_ALL or (op is CollectiveOp.GATHER and member == 0)
        shape = Shape(
            op=op,
            size=size,
            numel=numel,
            root=0,
            send_splits=splits if gives else (),
            receive_splits=splits if takes else (),
        )
        total += sent_numel(shape, member)
    return 4 * total


def start_rows(folder: Path, cases: Sequence[Case]) -> list[Row]:
    """Two live ranks of a DDP job, and what assistants take."""
    del cases
    rows, peaks = [], {}
    program = (EXAMPLES / "ddp" / "train.py", "--steps", 40)
    runs = Runs(folder, limit_s=LIMIT_S)
    for world_size in WORLDS:
        name = f"start-{world_size}"
        job = ("--world-size", world_size, "--cluster", "loopback-gloo", "--no-memory")
        live = ("--live", "0,1", "--transfers", "real", "--samples", 2, "--steps", 2)
        result = runs.run(name, (*job, *live), program)
        if not result:
            return [*rows, Row.at_most(f"{world_size:,} ranks: runs that failed", 1, 0)]
        boot_s = max(told["boot_s"] for told in result["live"])
        title = f"{world_size:,} ranks, 2 live: until they communicate"
        if world_size == WORLDS[-1]:
            rows.append(Row.at_most(title, boot_s, START_S, "s"))
        else:
            rows.append(Row.told(title, boot_s, "s"))
        (seen,) = (folder / name).glob("live/*/assistants.seen.json")
        peaks[world_size] = json.loads(seen.read_text())["peak_bytes"] / 2**20
        rows.append(Row.told(f"{world_size:,} ranks: assistants", peaks[world_size], "MiB"))
        sent = result["live"][0]["moved"]["sent_bytes"] / 2**20
        rows.append(Row.told(f"{world_size:,} ranks: rank 0 sent", sent, "MiB"))
    more = peaks[WORLDS[-1]] / peaks[WORLDS[0]] - 1
    title = f"assistants of {WORLDS[-1]:,} ranks beside {WORLDS[0]}: more memory"
    return [*rows, Row.at_most(title, max(0.0, more * 100), 10.0, "%")]


PARTS: dict[str, Callable[[Path, Sequence[Case]], list[Row]]] = {
    "values": value_rows,
    "bytes": byte_rows,
    "start": start_rows,
}


def main() -> int:
    """Print the table, and write it where asked; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="all by default")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = options.part or list(PARTS)
    cases = [case for case in CASES if options.case is None or case.name in options.case]
    rows = [] if options.json is None else read_rows(options.json)
    with tempfile.TemporaryDirectory() as folder:
        for part in chosen:
            found = [
                replace(row, name=f"{part} | {row.name}")
                for row in PARTS[part](Path(folder), cases)
            ]
            names = {row.name for row in found}
            rows = [row for row in rows if row.name not in names] + found
            if options.json:
                write_rows(rows, options.json)
    return finish(rows, title="Pruned transfers", json_path=options.json)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH")])
    )
    sys.exit(main())
