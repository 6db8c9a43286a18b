"""Measures gloo inside a cluster in a box, and describes the box as a cluster.

One process a machine runs every operation in groups of every size, all groups of a size at once, as
tensor- and data-parallel groups do in a job. ``python bench/box_links.py SPEC`` is that process.
Time is that after the last arrival: the clock is one for all namespaces of a machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from box import Box
from box_job import run_ranks
from prismscale.cluster import Cluster, Device, Measured, MeasuredCurve
from prismscale.graph.node import CollectiveOp
from prismscale.measure.collectives import links_of_send
from prismscale.processes.children import die_with_parent

OPS = (
    CollectiveOp.ALL_REDUCE,
    CollectiveOp.ALL_GATHER,
    CollectiveOp.REDUCE_SCATTER,
    CollectiveOp.BROADCAST,
    CollectiveOp.ALL_TO_ALL,
    CollectiveOp.SEND,
)
REPEATS = {256: 10, 4096: 10, 32_768: 10, 262_144: 8, 1_048_576: 6}
"""Calls by message bytes."""
REST_PERIODS = 2
"""Quota periods before each call: the link is measured, not a quota that barriers used up."""
ITEM_BYTES = 4
# torch 2.13 renamed these and warns about the names that 2.11 and 2.12 have.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Times = dict[str, list[int]]
"""``began`` and ``ended`` of each call of one rank, in nanoseconds."""


def measure_cluster(box: Box, folder: Path) -> Path:
    """Measure the links between all machines; returns the cluster file."""
    machines = box.spec.machines
    sizes = sorted({2, machines // 2, machines} - {1})
    rest_s = REST_PERIODS * box.spec.period_us / 1e6
    spec = {"sizes": sizes, "rest_s": rest_s, "out": str(folder)}
    run_ranks(box, "links", Path(__file__), [spec] * machines, folder)
    found = [json.loads((folder / f"links-{r}.json").read_text()) for r in range(machines)]
    curves = [_curve(op, size, found) for op in OPS for size in sizes if _applies(op, size)]
    path = folder / "box.toml"
    path.write_text(_cluster(box, tuple(curves)).to_toml())
    return path


def _applies(op: CollectiveOp, size: int) -> bool:
    return size == 2 or not op.is_p2p


def _key(op: CollectiveOp, size: int, n_bytes: int) -> str:
    return f"{op.spelling} {size} {n_bytes}"


def _curve(op: CollectiveOp, size: int, found: list[dict[str, Times]]) -> MeasuredCurve:
    """Median over repeats and groups."""
    times = []
    for n_bytes in REPEATS:
        key = _key(op, size, n_bytes)
        began_GKS, ended_GKS = (
            np.array([f[key][side] for f in found]).reshape(-1, size, REPEATS[n_bytes])
            for side in ("began", "ended")
        )
        times.append(float(np.median(ended_GKS.max(axis=1) - began_GKS.max(axis=1))))
    return MeasuredCurve(
        op=op, group_size=size, nodes=size, n_bytes=tuple(REPEATS), time_ns=tuple(times)
    )


def _cluster(box: Box, curves: tuple[MeasuredCurve, ...]) -> Cluster:
    """A cluster of one-rank nodes; its links, for what was not measured, are those of a send."""
    link, algorithms = links_of_send(curves)
    spec = box.spec
    return Cluster(
        name="cluster-in-a-box",
        device=Device(name="CPU", memory_bytes=os.sysconf("SC_PAGE_SIZE") * _pages()),
        devices_per_node=1,
        nics_per_node=1,
        intra_node=link,
        inter_node=link,
        algorithms=algorithms,
        measured=Measured(
            machine=f"{spec.machines} machines of {spec.core_share:g} cores "
            f"at {spec.rate_mbit} Mbit/s",
            date=date.today().isoformat(),
            curves=curves,
        ),
    )


def _pages() -> int:
    return os.sysconf("SC_PHYS_PAGES")


def main() -> None:
    """Measure as one rank; peers and rendezvous come from the environment."""
    die_with_parent()
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, Times] = {}
    for size in spec["sizes"]:
        groups = [list(range(first, first + size)) for first in range(0, world, size)]
        group, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
        for op in OPS:
            if _applies(op, size):
                for n_bytes, repeats in REPEATS.items():
                    call = _operation(op, n_bytes, rank % size, size, group)
                    found[_key(op, size, n_bytes)] = _time(call, repeats, spec["rest_s"])
    (Path(spec["out"]) / f"links-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def _time(call: Callable[[], object], repeats: int, rest_s: float) -> Times:
    call()
    times: Times = {"began": [], "ended": []}
    for _ in range(repeats):
        dist.barrier()
        time.sleep(rest_s)
        times["began"].append(time.monotonic_ns())
        call()
        times["ended"].append(time.monotonic_ns())
    return times


def _operation(
    op: CollectiveOp, n_bytes: int, member: int, size: int, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    part = torch.zeros(n_bytes // ITEM_BYTES // size)
    whole, other = (torch.zeros(n_bytes // ITEM_BYTES) for _ in range(2))

    def message() -> object:
        if member == 0:
            return dist.send(whole, group=group, group_dst=1)
        return dist.recv(whole, group=group, group_src=0)

    calls: dict[CollectiveOp, Callable[[], object]] = {
        CollectiveOp.ALL_REDUCE: lambda: dist.all_reduce(whole, group=group),
        CollectiveOp.ALL_GATHER: lambda: all_gather(whole, part, group=group),
        CollectiveOp.REDUCE_SCATTER: lambda: reduce_scatter(part, whole, group=group),
        CollectiveOp.BROADCAST: lambda: dist.broadcast(whole, group=group, group_src=0),
        CollectiveOp.ALL_TO_ALL: lambda: dist.all_to_all_single(other, whole, group=group),
        CollectiveOp.SEND: message,
    }
    return calls[op]


if __name__ == "__main__":
    main()
