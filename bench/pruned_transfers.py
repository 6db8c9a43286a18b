"""Live ranks that really communicate, among assistants in the place of everybody else.

    python bench/pruned_transfers.py [--part 'bytes | *']… [--json PATH]

``bytes``: what gloo moves in a network namespace of its own (needs root) beside what schedules say.
``start``: how long two live ranks of many take until they communicate, and what memory assistants
take. What live ranks compute among assistants is in ``real_values.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

from parts import Part, run_parts
from prismscale.graph.node import CollectiveOp
from prismscale.transfers.schedule import Shape, sent_numel
from prismscale.validation.rows import Row
from runs import EXAMPLES, HERE, Runs

LIMIT_S = 1500
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
LOOPBACK = "ip link set lo up && echo 0 > /proc/sys/net/ipv4/tcp_early_retrans"
"""Without loss probes: where a receiver is late, TCP would send a segment of 64 kB again, which is
no byte of gloo's (five of them were 3.3 % of a scatter of four)."""
NUMEL = 840_000
"""Divides by every group's size."""
MORE_BYTES = 2.0
"""Percent that headers, acknowledgements and barriers may add to what gloo counts."""


def byte_rows(size: int, folder: Path) -> list[Row]:
    """gloo's own bytes, of all members together, over those of schedules."""
    out = folder / f"bytes-{size}.json"
    command = ["unshare", "-n", "sh", "-c", f'{LOOPBACK} && exec "$@"', "sh"]
    command += [sys.executable, str(MOVED), str(size), str(NUMEL), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-1000:], file=sys.stderr)
        return [Row.at_most("runs that failed", 1, 0)]
    counted = json.loads(out.read_text())
    rows = []
    for name, op in COUNTED.items():
        more = (counted[name] / _scheduled_bytes(op, size) - 1) * 100
        rows.append(Row.at_most(f"{name}, gloo against schedules", abs(more), MORE_BYTES, "%"))
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


def start_rows(folder: Path) -> list[Row]:
    """Two live ranks of a DDP job, and what assistants take."""
    rows: list[Row] = []
    peaks: dict[int, float] = {}
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


PARTS: dict[str, Part] = {
    **{f"bytes | {size} members": partial(byte_rows, size) for size in (4, 5, 8)},
    "start": start_rows,
}


if __name__ == "__main__":
    sys.exit(run_parts(PARTS, title="Pruned transfers", doc=__doc__))
