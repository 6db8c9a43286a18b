"""Programs that nobody here wrote, on the null device: what each of them shows.

    python bench/null_matrix.py [--case NAME]… [--json PATH] [--against PATH]

Run with a Python that has torchtitan 0.3.0, megatron-core 0.16.1, accelerate, transformers and
DeepSpeed beside prismscale (``make test-frameworks`` makes one); Transformer Engine's Python code
is installed by hand (docs/null-device.md). A case whose package is missing
is left out, and said so. The matrix may be run in pieces: PATH keeps the rows of cases that a run
leaves out, and has those of a case as soon as it is done. Models are small: the matrix shows that a
parallelism runs through the program's own code at a real world size, not how fast or how large a
real model is. ``--against`` holds communication and peak memory against the rows that another build
of torch gave: where a program takes the same path, they are the same.

What ZeRO-3 holds between two steps stands beside what ZeRO's authors give: 2 bytes of parameter, 2
of gradient and 12 of optimizer for each parameter, over all ranks (arXiv:1910.02054, section 3.1).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import matrix_cases
import own_commands
from matrix_cases import Case
from null_programs import GIB, prepare, reserved_bytes
from prismscale.graph.io import load_graph
from prismscale.graph.job_graph import JobGraph
from prismscale.graph.node import NodeKind
from prismscale.graph.trace import RankTrace
from prismscale.runfolder import RunFolder
from prismscale.validation.rows import Row, finish, read_rows, write_rows
from runs import HERE, Runs, folder_name, is_installed

PROGRAMS = (*matrix_cases.PROGRAMS, *own_commands.PROGRAMS)
LIMIT_S = 1800
COMMUNICATION, PEAK = "digest of communication", "peak"
DIFFERENCE = "difference from"


def communication_digest(graph: JobGraph) -> int:
    """CRC-32 of what each rank says in a step: operation, bytes, size of the group, peer. How
    ranks are divided into classes, which depends on host time too, does not change it."""
    said_by_class = np.array([zlib.crc32(repr(said(c.trace)).encode()) for c in graph.classes])
    return zlib.crc32(said_by_class[graph.class_of_R].astype("<u4").tobytes())


def said(trace: RankTrace) -> list[tuple[int, ...]]:
    """The communication of a step of one rank, in its order."""
    columns = (trace.kind_N, trace.op_N, trace.bytes_N, trace.peer_N)
    return [
        (len(trace.groups[int(trace.group_index_N[n])].ranks), *(int(c[n]) for c in columns))
        for n in range(trace.n_prologue, trace.n_nodes)
        if trace.kind_N[n] != NodeKind.COMPUTE
    ]


def compared(rows: Sequence[Row], path: Path) -> list[Row]:
    """Whether communication and peak are those of the rows in ``path``."""
    others = {row.name: row.value for row in read_rows(path)}
    found = []
    for row in rows:
        name, _, what = row.name.rpartition(": ")
        if row.name not in others:
            continue
        off = abs(row.value - others[row.name])
        if what == PEAK:
            found.append(Row.at_most(f"{name}: {what}, {DIFFERENCE} {path.stem}", off, 0, "bytes"))
        elif what == COMMUNICATION:
            # How far two digests are apart says nothing.
            found.append(Row.at_most(f"{name}: {what}, {DIFFERENCE} {path.stem}", bool(off), 0))
    return found


def run(program: Case, runs: Runs) -> list[Row]:
    """Run one program through the command line."""
    out = folder_name(program.name)
    began = time.monotonic()
    found = runs.null(out, program.world_size, program.command)
    wall_s = time.monotonic() - began
    if not found:
        return [Row.at_least(f"{program.name}: completes", 0, 1)]
    root = runs.folder / out
    reserved = reserved_bytes(root, found["captured"]) / GIB
    graph = load_graph(RunFolder(root=root).graph)
    peak = max(stage["peak_bytes"] or 0 for stage in found["stages"])
    return [
        Row.at_least(f"{program.name}, {program.world_size} ranks: completes", 1, 1),
        Row.told(f"{program.name}: wall time", wall_s, "s"),
        Row.told(f"{program.name}: step", found["step_ns"] / 1e6, "ms"),
        Row.told(f"{program.name}: {PEAK}", peak, "bytes"),
        Row.told(f"{program.name}: reserved", reserved, "GiB"),
        Row.told(f"{program.name}: {COMMUNICATION}", communication_digest(graph)),
        *stand_ins(program.name, found),
        *(program.more(root) if program.more else []),
    ]


def stand_ins(name: str, found: dict[str, Any]) -> list[Row]:
    """Each stand-in that the program imported, with its share of the device's time."""
    return [
        Row.told(f"{name}: share of {one['name']}'s stand-in", one["share"])
        for one in found["stand_ins"]
    ]


def rows_kept(path: Path | None, chosen: Sequence[Case]) -> list[Row]:
    """What earlier runs wrote to ``path`` about cases that are not run now."""
    others = [program for program in PROGRAMS if program not in chosen]
    rows = (
        row for row in read_rows(path) if not row.name.rpartition(", ")[2].startswith(DIFFERENCE)
    )
    return [row for row in rows if any(program.owns(row) for program in others)]


def main() -> int:
    """Run the cases, print the table, and write it where asked; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--case", action="append", help="part of a name; all by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    parser.add_argument("--against", type=Path, help="rows of another build of torch")
    options = parser.parse_args()
    chosen = [p for p in PROGRAMS if any(part in p.name for part in options.case or [""])]
    rows = rows_kept(options.json, chosen)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if is_installed("tokenizers") and not (folder / "tokenizer").exists():
            prepare(folder)
        for program in chosen:
            if not program.is_installed:
                continue
            found = run(program, Runs(folder, limit_s=LIMIT_S))
            print(*(f"{r.name}: {r.value:g} {r.unit}" for r in found), sep="\n", flush=True)
            rows += found
            if options.json:
                write_rows(rows, options.json)
    if options.against:
        rows += compared(rows, options.against)
    return finish(rows, title="Frameworks on the null device", json_path=options.json)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")])
    )
    sys.exit(main())
