"""Writes ranks of a re-timed job as Kineto traces, as ``torch.profiler`` would record them.

Each rank gets one file of Chrome trace JSON. A stretch of work on a stream appears as the kernels
that were launched for it, one after the other, if the run kept them; else as one kernel. A
communication appears as a NCCL kernel from this rank's arrival to the end: on a GPU, too, the
kernel waits for the other ranks. Times are microseconds from the first step that is written.

Sources: ``libkineto/src/output_json.cpp`` of pytorch/kineto, and the arguments that
HolisticTraceAnalysis reads: ``hta/configs/event_args_formats/event_args_1.0.0.yaml``.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prismscale.errors import UsageError
from prismscale.files import atomic_write
from prismscale.graph.job_graph import JobGraph, RankClass
from prismscale.graph.launch_paths import is_launch_path_N
from prismscale.graph.node import CollectiveOp, NodeKind
from prismscale.graph.trace import HOST
from prismscale.sim.timeline import RankTimeline, Timeline

FIRST_STREAM, COMMUNICATION_STREAMS = 7, 20
"""Lowest stream numbers, as they are on a GPU: 7 for computation, 20 for NCCL."""
HOST_THREAD = 1
LAUNCH_US = 4.0
SPELLING = {
    CollectiveOp.ALL_REDUCE: ("allreduce", "AllReduce_Sum_f32_RING_LL"),
    CollectiveOp.ALL_GATHER: ("_allgather_base", "AllGather_RING_LL"),
    CollectiveOp.REDUCE_SCATTER: ("_reduce_scatter_base", "ReduceScatter_Sum_f32_RING_LL"),
    CollectiveOp.BROADCAST: ("broadcast", "Broadcast_RING_LL"),
    CollectiveOp.REDUCE: ("reduce", "Reduce_Sum_f32_RING_LL"),
    CollectiveOp.GATHER: ("gather", "SendRecv"),
    CollectiveOp.SCATTER: ("scatter", "SendRecv"),
    CollectiveOp.ALL_TO_ALL: ("all_to_all", "SendRecv"),
    CollectiveOp.BARRIER: ("barrier", "AllReduce_Sum_u8_RING_LL"),
    CollectiveOp.SEND: ("send", "SendRecv"),
    CollectiveOp.RECV: ("recv", "SendRecv"),
    CollectiveOp.SYMM_MEM_BARRIER: ("barrier", "AllReduce_Sum_u8_RING_LL"),
}
"""For each operation, its name in torch's NCCL wrapper and the name of NCCL's kernel."""

Kernels = Callable[[RankClass, int], Sequence[tuple[str, int]]]
"""``(class, body node)`` → name and nanoseconds of each kernel of a stretch of work; empty where
they are unknown."""


def no_kernels(rank_class: RankClass, node: int) -> Sequence[tuple[str, int]]:
    """Return no kernels, for runs that did not keep them."""
    return ()


def write_kineto(
    graph: JobGraph,
    timeline: Timeline,
    folder: Path,
    *,
    steps: int = 1,
    prefix: str = "rank",
    kernels: Kernels = no_kernels,
) -> list[Path]:
    """Write every rank whose nodes the timeline holds (``simulate(…, ranks=…)``).

    Args:
        graph: the job.
        timeline: the re-timed job; its last steps are written.
        folder: where to write; created if it is missing.
        steps: number of steps to write.
        prefix: start of the file names, which are ``PREFIX.RANK.pt.trace.json.gz``.
        kernels: gives the kernels of a stretch of work.

    Raises:
        UsageError: the timeline holds no rank's nodes.
        StorageError: a file cannot be written.
    """
    if not timeline.ranks:
        raise UsageError("the timeline holds no rank's nodes; simulate with ranks=…")
    paths = []
    for rank, rows in sorted(timeline.ranks.items()):
        trace = _RankTrace(graph, timeline, rows, steps, kernels)
        path = folder / f"{prefix}.{rank}.pt.trace.json.gz"
        # No time in the gzip header, so that equal runs give equal files.
        with (
            atomic_write(path) as file,
            gzip.GzipFile(fileobj=file, mode="wb", compresslevel=5, mtime=0) as packed,
        ):
            trace.write(io.TextIOWrapper(packed, encoding="utf-8", write_through=True))
        paths.append(path)
    return paths


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlacedNode:
    """One node on the timeline."""

    node: int
    """The template node, as the class's trace stores it."""
    start_ns: int
    end_ns: int


class _RankTrace:
    """The trace of one rank."""

    def __init__(
        self,
        graph: JobGraph,
        timeline: Timeline,
        rows: RankTimeline,
        steps: int,
        kernels: Kernels,
    ) -> None:
        self._graph, self._rows, self._kernels = graph, rows, kernels
        self._class = graph.classes[rows.class_index]
        self._member = int(graph.member_of_R[rows.rank])
        ends = timeline.step_end_ns_TDR[:, 0, rows.rank].tolist()
        self._first_step = max(len(ends) - steps, 0)
        self._borders = [0, *ends][self._first_step :]
        self._origin_ns = self._borders[0]
        self._correlation = 0
        self._groups = [self._group(index) for index in range(len(self._class.slots))]
        self._streams = self._numbered_lanes()
        self._is_launch_path_N = is_launch_path_N(self._class.trace)

    def write(self, text: io.TextIOWrapper) -> None:
        """Write the whole trace."""
        head = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "modelled", "totalGlobalMem": 0}],
            "distributedInfo": {
                "backend": "nccl",
                "rank": self._rows.rank,
                "world_size": self._graph.world_size,
                "pg_count": len(self._groups),
                "pg_config": self._groups,
                "nccl_version": "2.0",
            },
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": 0,
        }
        text.write(json.dumps(head)[:-1])
        text.write(', "traceEvents": [\n')
        for n, event in enumerate(self._events()):
            text.write(",\n" if n else "")
            text.write(json.dumps(event))
        text.write("\n]}\n")
        text.flush()

    def _group(self, index: int) -> dict[str, Any]:
        slot = self._class.slots[index]
        family, column = self._graph.families[slot.family], int(slot.group_M[self._member])
        ranks = family.ranks_KG[:, column].tolist()
        first = sum(f.n_groups for f in self._graph.families[: slot.family])
        return {
            "pg_name": str(first + column),
            "pg_desc": family.name or "undefined",
            "backend_config": "cuda:nccl",
            "pg_size": len(ranks),
            "ranks": ranks,
        }

    def _numbered_lanes(self) -> dict[int, int]:
        """Return the stream number of each lane but the host's."""
        trace = self._class.trace
        communicating = set(trace.lane_N[trace.communicates_N].tolist())
        found: dict[int, int] = {}
        for index, name in enumerate(trace.lanes):
            if name != HOST:
                first = COMMUNICATION_STREAMS if index in communicating else FIRST_STREAM
                found[index] = first + len(found)
        return found

    def _events(self) -> Iterator[dict[str, Any]]:
        yield _event("M", "process_name", pid=0, args={"name": "GPU 0"})
        for n, (start, end) in enumerate(zip(self._borders, self._borders[1:], strict=False)):
            name = f"ProfilerStep#{self._first_step + n}"
            yield self._span("user_annotation", name, start, end, HOST_THREAD)
        issued_ns = self._origin_ns
        for placed in self._placed():
            trace = self._class.trace
            lane = int(trace.lane_N[placed.node])
            if lane not in self._streams and trace.kind_N[placed.node] == NodeKind.COMPUTE:
                label = trace.labels[int(trace.label_N[placed.node])]
                yield self._span("cpu_op", label, placed.start_ns, placed.end_ns, HOST_THREAD)
                issued_ns = max(issued_ns, placed.end_ns)
            elif not self._is_launch_path_N[placed.node]:
                yield from self._on_device(placed, min(issued_ns, placed.start_ns))

    def _placed(self) -> Iterator[_PlacedNode]:
        trace, rows = self._class.trace, self._rows
        times = zip(rows.start_ns_N.tolist(), rows.end_ns_N.tolist(), strict=True)
        for x, (start, end) in enumerate(times, start=rows.first_position):
            if x >= trace.n_prologue and start >= self._origin_ns:
                yield _PlacedNode(node=trace.template(x), start_ns=start, end_ns=end)

    def _on_device(self, placed: _PlacedNode, issued_ns: int) -> Iterator[dict[str, Any]]:
        trace = self._class.trace
        stream = self._streams.get(int(trace.lane_N[placed.node]), FIRST_STREAM)
        if trace.kind_N[placed.node] != NodeKind.COMPUTE:
            name, args = self._communication(placed.node)
            yield from self._kernel(name, placed.start_ns, placed.end_ns, stream, issued_ns, args)
            return
        parts = self._kernels(self._class, placed.node - trace.n_prologue)
        total = sum(ns for _, ns in parts)
        if not total:
            label = trace.labels[int(trace.label_N[placed.node])]
            yield from self._kernel(label, placed.start_ns, placed.end_ns, stream, issued_ns, {})
            return
        # Kernels measured or modelled one by one may sum to a little more or less than the node.
        scale, done = (placed.end_ns - placed.start_ns) / total, 0
        for name, ns in parts:
            start = placed.start_ns + round(done * scale)
            done += ns
            end = placed.start_ns + round(done * scale)
            yield from self._kernel(name, start, end, stream, issued_ns, {})

    def _communication(self, node: int) -> tuple[str, dict[str, Any]]:
        trace = self._class.trace
        op = CollectiveOp(int(trace.op_N[node]))
        group = self._groups[int(trace.group_index_N[node])]
        called, kernel = SPELLING[op]
        n_bytes, size = int(trace.bytes_N[node]), group["pg_size"]
        part = max(n_bytes // size, 1)
        args = {
            "Collective name": called,
            "In msg nelems": part
            if op in (CollectiveOp.ALL_GATHER, CollectiveOp.GATHER)
            else n_bytes,
            "Out msg nelems": part
            if op in (CollectiveOp.REDUCE_SCATTER, CollectiveOp.SCATTER)
            else n_bytes,
            "Group size": size,
            "dtype": "Byte",
            "In split size": "[]",
            "Out split size": "[]",
            "Process Group Name": group["pg_name"],
            "Process Group Description": group["pg_desc"],
            "Process Group Ranks": json.dumps(group["ranks"]),
        }
        if op.is_p2p:
            ranks = group["ranks"]
            other = ranks[(ranks.index(self._rows.rank) + int(trace.peer_N[node])) % size]
            ends = (self._rows.rank, other)
            source, target = ends if op is CollectiveOp.SEND else ends[::-1]
            args |= {"Src Rank": source, "Dst Rank": target}
        return f"ncclDevKernel_{kernel}(ncclDevKernelArgsStorage<4096ul>)", args

    def _kernel(
        self, name: str, start: int, end: int, stream: int, issued_ns: int, more: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of a kernel's launch and of the kernel."""
        self._correlation += 1
        shared = {"correlation": self._correlation, "External id": self._correlation}
        launch = self._span("cuda_runtime", "cudaLaunchKernel", issued_ns, issued_ns, HOST_THREAD)
        launch["dur"] = min(LAUNCH_US, max(start - issued_ns, 0) / 1000)
        launch["args"] |= shared | {"cbid": 211}
        yield launch
        device = self._span("kernel", name, start, end, stream, pid=0)
        device["args"] |= shared | {"device": 0, "context": 1, "stream": stream, **more}
        yield device

    def _span(
        self, category: str, name: str, start: int, end: int, thread: int, pid: int = 1
    ) -> dict[str, Any]:
        return _event(
            "X",
            name,
            pid=pid,
            tid=thread,
            cat=category,
            ts=(start - self._origin_ns) / 1000,
            dur=max(end - start, 0) / 1000,
            args={},
        )


def _event(phase: str, name: str, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, **more}
