"""Measures communication on this machine, for ``prismscale calibrate collectives``.

Real processes form a gloo group on the loopback interface and run every operation over a range of
message sizes. Monotonic time is one clock for all processes of a host, so the time *after the last
arrival* is read directly: the last end minus the last start over the members of each call.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from prismscale.cluster import (
    AlgorithmTuning,
    Cluster,
    Device,
    Link,
    Measured,
    MeasuredCurve,
)
from prismscale.errors import PrismscaleError, UsageError
from prismscale.files import write_text
from prismscale.graph.node import CollectiveOp
from prismscale.processes.children import die_with_parent
from prismscale.torch_versions import renamed

_all_gather = renamed(dist, "all_gather_single", "all_gather_into_tensor")
_reduce_scatter = renamed(dist, "reduce_scatter_single", "reduce_scatter_tensor")

DEFAULT_SIZES = tuple(64 * 4**i for i in range(11))
"""64 B to 64 MiB."""

_MEASURED_OPS = (
    CollectiveOp.ALL_REDUCE,
    CollectiveOp.ALL_GATHER,
    CollectiveOp.REDUCE_SCATTER,
    CollectiveOp.BROADCAST,
    CollectiveOp.ALL_TO_ALL,
    CollectiveOp.SEND,
    CollectiveOp.BARRIER,
)
_SEND_RANKS = (0, 1)
_ITEM_BYTES = 4
_ROUNDS = 5
_MAX_REPEATS = 300
_MIN_REPEATS = 3
_ONE_NODE = 65_536
"""Devices per node of a cluster that is one machine: more than any group has members."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """One point measured by one rank in one round; arrays run over repeats."""

    rank: int
    round_index: int
    op: CollectiveOp
    n_bytes: int
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]


def measure_collectives(
    *,
    world_size: int = 2,
    sizes: Sequence[int] = DEFAULT_SIZES,
    out: Path,
    progress: Callable[[str, float], None] | None = None,
    seconds: float = 40.0,
    date: str | None = None,
) -> Cluster:
    """Measure gloo between ``world_size`` processes here and write a cluster file.

    Args:
        world_size: processes, and the group size of the measured curves.
        sizes: message bytes, in the convention of :class:`CollectiveOp`. They round up to whole
            items for every process.
        out: the TOML file to write; it appears complete or not at all.
        progress: called with what is being measured and the fraction done.
        seconds: time to spend, start-up aside; the largest messages may exceed their share.
        date: recorded as the day of the measurement; today if not given.

    Raises:
        UsageError: the world size is under 2, or sizes are empty or not positive.
        PrismscaleError: a measuring process failed.
        StorageError: ``out`` cannot be written.
    """
    if world_size < 2:
        raise UsageError(f"world size {world_size}; communication needs 2 processes or more")
    if not sizes or min(sizes) < 1:
        raise UsageError(f"sizes {list(sizes)}; give one or more, each at least 1 byte")
    samples = _run_processes(world_size, _carried(sizes, world_size), seconds, progress)
    measured = Measured(
        machine=_describe_machine(),
        date=date or time.strftime("%Y-%m-%d"),
        curves=_curves(samples, world_size),
    )
    cluster = _cluster_from(measured)
    write_text(out, cluster.to_toml())
    return cluster


def _carried(sizes: Sequence[int], world_size: int) -> list[int]:
    """Return the message sizes that can be measured, ascending: whole shares for every member.

    Sizes that round up to the same one are measured once.
    """
    whole = _ITEM_BYTES * world_size
    return sorted({-(-size // whole) * whole for size in sizes})


def _run_processes(
    world_size: int,
    sizes: list[int],
    seconds: float,
    progress: Callable[[str, float], None] | None,
) -> list[_Sample]:
    context = get_context("spawn")
    queue: Queue[Any] = context.Queue()
    with tempfile.TemporaryDirectory(prefix="prismscale-calibrate-") as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(
                target=_worker, args=(rank, world_size, sizes, seconds, store, queue), daemon=True
            )
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            return _collect(queue, processes, progress)
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
                process.join()


def _collect(
    queue: Queue[Any],
    processes: Sequence[BaseProcess],
    progress: Callable[[str, float], None] | None,
) -> list[_Sample]:
    samples: list[_Sample] = []
    finished = 0
    while finished < len(processes):
        try:
            message = queue.get(timeout=0.5)
        except Empty:
            dead = [p for p in processes if p.exitcode not in (None, 0)]
            if dead:
                codes = ", ".join(str(p.exitcode) for p in dead)
                raise PrismscaleError(
                    f"a measuring process ended with exit code {codes}; its message is above"
                ) from None
            continue
        if message is None:
            finished += 1
        elif isinstance(message, tuple):
            if progress is not None:
                progress(*message)
        else:
            samples.append(message)
    return samples


def _worker(
    rank: int, world_size: int, sizes: list[int], seconds: float, store: str, queue: Queue[Any]
) -> None:
    die_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # As in training on so few cores, arithmetic must not compete with gloo's threads.
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    points = [
        (op, n_bytes)
        for op in _MEASURED_OPS
        for n_bytes in ([1] if op == CollectiveOp.BARRIER else sizes)
    ]
    budget_s = seconds / (_ROUNDS * len(points))
    for round_index in range(_ROUNDS):
        for i, (op, n_bytes) in enumerate(points):
            if rank == 0:
                done = (round_index * len(points) + i) / (_ROUNDS * len(points))
                queue.put((f"{op.spelling} {n_bytes:,} B", done))
            sample = _measure_point(rank, world_size, op, n_bytes, round_index, budget_s)
            if op != CollectiveOp.SEND or rank in _SEND_RANKS:
                queue.put(sample)
    dist.barrier()
    dist.destroy_process_group()
    queue.put(None)


def _measure_point(
    rank: int, world_size: int, op: CollectiveOp, n_bytes: int, round_index: int, budget_s: float
) -> _Sample:
    call, exact_bytes = _operation(op, n_bytes, rank, world_size)
    repeats = _agree_on_repeats(call, budget_s)
    start_ns = np.empty(repeats, dtype=np.int64)
    end_ns = np.empty(repeats, dtype=np.int64)
    for i in range(repeats):
        dist.barrier()
        start_ns[i] = time.monotonic_ns()
        call()
        end_ns[i] = time.monotonic_ns()
    return _Sample(
        rank=rank,
        round_index=round_index,
        op=op,
        n_bytes=exact_bytes,
        start_ns=start_ns,
        end_ns=end_ns,
    )


def _agree_on_repeats(call: Callable[[], object], budget_s: float) -> int:
    """Warm up, then let rank 0 decide how many calls fit the budget."""
    call()
    dist.barrier()
    began = time.monotonic()
    call()
    dist.barrier()
    fit = budget_s / max(time.monotonic() - began, 1e-6)
    repeats = torch.tensor([min(max(int(fit), _MIN_REPEATS), _MAX_REPEATS)])
    dist.broadcast(repeats, src=0)
    return int(repeats)


def _operation(
    op: CollectiveOp, n_bytes: int, rank: int, world_size: int
) -> tuple[Callable[[], object], int]:
    """Return a call of ``op`` and the bytes that it carries."""
    share = -(-n_bytes // (_ITEM_BYTES * world_size))
    whole = torch.zeros(share * world_size)
    part = torch.zeros(share)
    calls: dict[CollectiveOp, Callable[[], object]] = {
        CollectiveOp.ALL_REDUCE: lambda: dist.all_reduce(whole),
        CollectiveOp.ALL_GATHER: lambda: _all_gather(whole, part),
        CollectiveOp.REDUCE_SCATTER: lambda: _reduce_scatter(part, whole),
        CollectiveOp.BROADCAST: lambda: dist.broadcast(whole, src=0),
        CollectiveOp.SEND: lambda: _send_or_receive(whole, rank),
        CollectiveOp.BARRIER: dist.barrier,
    }
    if op == CollectiveOp.ALL_TO_ALL:
        output = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(output, whole), whole.nbytes
    return calls[op], 1 if op == CollectiveOp.BARRIER else whole.nbytes


def _send_or_receive(tensor: torch.Tensor, rank: int) -> None:
    """Send one message from rank 0 to rank 1; other ranks do nothing."""
    sender, receiver = _SEND_RANKS
    if rank == sender:
        dist.send(tensor, dst=receiver)
    elif rank == receiver:
        dist.recv(tensor, src=sender)


def _curves(samples: Sequence[_Sample], world_size: int) -> tuple[MeasuredCurve, ...]:
    """Return a curve per operation: the median over repeats, then the fastest round.

    The fastest round counts because other work on the machine only ever adds time.
    """
    points: dict[tuple[CollectiveOp, int], dict[int, list[_Sample]]] = defaultdict(dict)
    for sample in samples:
        points[sample.op, sample.n_bytes].setdefault(sample.round_index, []).append(sample)
    by_op: dict[CollectiveOp, dict[int, float]] = defaultdict(dict)
    for (op, n_bytes), rounds in points.items():
        by_op[op][n_bytes] = min(_median_after_last_arrival(r) for r in rounds.values())
    return tuple(
        MeasuredCurve(
            op=op,
            group_size=len(_SEND_RANKS) if op == CollectiveOp.SEND else world_size,
            n_bytes=tuple(sorted(curve)),
            time_ns=tuple(round(curve[b]) for b in sorted(curve)),
        )
        for op, curve in by_op.items()
    )


def _median_after_last_arrival(members: Sequence[_Sample]) -> float:
    last_start = np.max([s.start_ns for s in members], axis=0)
    last_end = np.max([s.end_ns for s in members], axis=0)
    return float(np.median(last_end - last_start))


def links_of_send(
    curves: Sequence[MeasuredCurve],
) -> tuple[Link, dict[str, AlgorithmTuning]]:
    """Return links, from the measured send, for groups and operations that were not measured.

    Latency is that of its smallest message, bandwidth that of its largest. The algorithms that are
    returned with the link add nothing.
    """
    send = next(c for c in curves if c.op == CollectiveOp.SEND)
    link = Link(
        latency_ns=send.time_ns[0], bandwidth_bytes_per_s=1e9 * send.n_bytes[-1] / send.time_ns[-1]
    )
    plain = AlgorithmTuning(
        base_ns=0,
        latency_factor=1.0,
        intra_efficiency=1.0,
        inter_efficiency=1.0,
        chunk_ns=0,
        chunk_limit_ns=1.0,
    )
    return link, dict.fromkeys(("ring", "pairwise", "rooted", "p2p"), plain)


def _cluster_from(measured: Measured) -> Cluster:
    """Return a one-machine cluster; the send curve gives its links, for groups not measured."""
    link, algorithms = links_of_send(measured.curves)
    return Cluster(
        name="loopback-gloo",
        device=Device(
            name="CPU", memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        ),
        devices_per_node=_ONE_NODE,
        nics_per_node=_ONE_NODE,
        intra_node=link,
        inter_node=link,
        algorithms=algorithms,
        measured=measured,
        sources={
            "measured": f"gloo over the loopback interface of {measured.machine}, {measured.date}; "
            f"median over repeats, fastest of {_ROUNDS} rounds",
            "links": "latency and bandwidth of the smallest and largest measured send",
        },
    )


def _describe_machine() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{cores}-core {platform.machine()} machine, torch {torch.__version__}"
