"""The launches behind each node of a trace, from which nodes are costed again without a capture.

On the null device a node stands for many kernel launches, and its duration follows from their
costs. A :class:`LaunchLog` holds the launches of one captured rank in program order, and the range
of launches that each node stands for. With other costs (another GPU, a table of measured kernels,
another ``--compute-scale``) :func:`recost` computes the duration that every node would have in a
capture with these costs, to the nanosecond. Two kinds of program would behave differently in such a
capture: one that polls an event polls more often on a slower device, and one that reads the clock
may act on it.

The file ``launches-<rank>.parquet`` lies beside the trace. It holds a single row of lists.

Array axes: ``E`` entries (launches in program order), ``N`` nodes of the trace that are
computation, ``S`` signatures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from enum import IntEnum
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from prismscale.cost.kernel import KernelCost, KernelModel
from prismscale.errors import FormatError
from prismscale.graph.parquet import (
    Header,
    integers,
    list_column,
    lists,
    read_table,
    schema_of,
    write_table,
)

REPLAYED = "replayed "
"""Prefix of the signature of a launch that a CUDA graph makes: it costs the host nothing."""
GRAPH_LAUNCH = "cuda::graph_launch"
"""Operator in the signature of a whole CUDA graph's launch: it costs the host only."""
STATED = -1
"""Signature of an entry that is no launch and whose time is stated: work of the host, or what the
kernel launched before it waited for kernels of other streams."""
HOST_ONLY = -1
"""Lane of an entry that is the host's own work."""
LONGEST_NS = 2**40
"""Limit on an entry's host work, 18 minutes: sums over all entries of a file stay exact."""


class NodePath(IntEnum):
    """Which of three formulas gives a node's duration.

    ``d`` and ``h`` are an entry's cost on the device and on the host. The formulas are those of
    ``csrc/spans.h``.
    """

    WORK = 0
    """Work of the stream: the sum of ``d`` over the node's entries."""
    LAUNCH = 1
    """Launch path, from the host to the end of the stream's work: the maximum, over the node's
    entries, of the sum of ``h`` from ``since`` through that entry plus the sum of ``d`` of that
    entry and those after it."""
    HOST = 2
    """Work of the host: the sum of ``h`` over the entries of all lanes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputedPart:
    """A part of the program that a backward pass computes a second time."""

    first_entry: int
    stop_entry: int
    first_node: int
    """Position, as in :attr:`LaunchLog.node_N`, from which communications belong to the part."""
    stop_node: int
    """Position after the part's last node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchLog:
    """The launches of one captured rank, and which of them each node stands for."""

    signatures: tuple[str, ...]
    """Text of each distinct call; see :mod:`prismscale.cost.kernel_signature`."""
    signature_E: NDArray[np.int32]
    """Index into :attr:`signatures`, or :data:`STATED`."""
    lane_E: NDArray[np.int32]
    """Stream of the launch, counted from 1 in order of first use, or :data:`HOST_ONLY`."""
    stated_ns_E: NDArray[np.int64]
    """Duration of host work that launches nothing; 0 for launches, which cost what their signature
    costs."""
    node_N: NDArray[np.int32]
    """Position of the node in the trace (prologue, then body), ascending. The log of a run leaves
    the prologue out, so its positions count from the beginning of the body."""
    path_N: NDArray[np.int32]
    """:class:`NodePath` of each node."""
    lane_N: NDArray[np.int32]
    """Stream, as in :attr:`lane_E`; 0 is the host."""
    since_N: NDArray[np.int32]
    """Entry from which a launch path counts the host's time; at most :attr:`first_N`."""
    first_N: NDArray[np.int32]
    """The node's first entry. Entries of other lanes may lie between first and stop: only a node of
    the host counts them."""
    stop_N: NDArray[np.int32]
    """Entry after the node's last."""
    recomputed: tuple[RecomputedPart, ...] = ()

    @property
    def n_entries(self) -> int:
        """Number of entries: launches, and other work of the host."""
        return len(self.signature_E)

    @property
    def is_recomputed_E(self) -> NDArray[np.bool_]:
        """Whether each entry is part of what a backward pass computes a second time."""
        is_recomputed_E = np.zeros(self.n_entries, dtype=bool)
        for part in self.recomputed:
            is_recomputed_E[part.first_entry : part.stop_entry] = True
        return is_recomputed_E

    def for_trace(self, *, prologue_stop: int, body_start: int, body_stop: int) -> LaunchLog:
        """Return this log of a capture's stream as the log of the trace: its nodes are renumbered.

        Args:
            prologue_stop: stream positions below this are the trace's prologue, in this order.
            body_start: stream position of the first node of the trace's body.
            body_stop: stream position after the last node of the trace's body.
        """
        in_body_N = (self.node_N >= body_start) & (self.node_N < body_stop)
        kept_N = (self.node_N < prologue_stop) | in_body_N
        nodes = {name: getattr(self, name)[kept_N] for name in _NODE_COLUMNS}
        nodes["node_N"] -= np.where(in_body_N[kept_N], body_start - prologue_stop, 0).astype(
            np.int32
        )
        # Drop the entries at the beginning and at the end that no node counts.
        stop = int(nodes["stop_N"].max(initial=0))
        start = int(nodes["since_N"].min(initial=stop))
        for name in ("since_N", "first_N", "stop_N"):
            nodes[name] -= start
        entries = {name: getattr(self, name)[start:stop].copy() for name in _ENTRY_COLUMNS}
        launches_E = entries["signature_E"] != STATED
        used, number_E = np.unique(entries["signature_E"][launches_E], return_inverse=True)
        entries["signature_E"][launches_E] = number_E
        return replace(
            self,
            signatures=tuple(self.signatures[s] for s in used.tolist()),
            recomputed=tuple(self._parts(start, stop, prologue_stop, body_start, body_stop)),
            **entries,
            **nodes,
        )

    def _parts(
        self, start: int, stop: int, prologue_stop: int, body_start: int, body_stop: int
    ) -> Iterator[RecomputedPart]:
        """Yield the recomputed parts of the body, with the entries and positions of the new log."""
        for part in self.recomputed:
            if body_start <= part.first_node and part.stop_node <= body_stop:
                moved = body_start - prologue_stop
                yield RecomputedPart(
                    first_entry=min(max(part.first_entry - start, 0), stop - start),
                    stop_entry=min(max(part.stop_entry - start, 0), stop - start),
                    first_node=part.first_node - moved,
                    stop_node=part.stop_node - moved,
                )


def costs(
    log: LaunchLog, model: KernelModel, slowness: float = 1.0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the device and host cost in ns of each signature (S), as a capture would use them.

    Args:
        log: its signatures are costed.
        model: the kernel model of the capture.
        slowness: factor on all costs. Each signature's cost is rounded, as in a capture. Scaling
            a node's duration instead could be off by half a nanosecond for each of its launches.
    """
    found = [_cost(model, signature) for signature in log.signatures]
    device_ns_S = [round(cost.device_ns * slowness) for cost in found]
    host_ns_S = [round(cost.host_ns * slowness) for cost in found]
    return np.array(device_ns_S, dtype=np.int64), np.array(host_ns_S, dtype=np.int64)


def kinds(log: LaunchLog, model: KernelModel) -> list[str]:
    """Return the kind of kernel of each signature (S)."""
    return [_cost(model, signature).kind for signature in log.signatures]


def _cost(model: KernelModel, signature: str) -> KernelCost:
    if signature.startswith(REPLAYED):
        return replace(model.cost(signature.removeprefix(REPLAYED)), host_ns=0)
    cost = model.cost(signature)
    return replace(cost, device_ns=0) if signature.startswith(GRAPH_LAUNCH) else cost


def recost(
    log: LaunchLog,
    device_ns_of_signature: NDArray[np.int64],
    host_ns_of_signature: NDArray[np.int64],
    *,
    recomputes: bool = True,
) -> NDArray[np.int64]:
    """Compute the durations of the log's nodes (N) in ns from costs of its signatures (S).

    Without ``recomputes``, what a backward pass makes a second time costs nothing.
    """
    launches_E = log.signature_E != STATED
    is_host_E = log.lane_E == HOST_ONLY
    stated_ns_E = log.stated_ns_E.astype(np.int64)
    device_ns_E = np.where(is_host_E, 0, stated_ns_E)
    device_ns_E[launches_E] = device_ns_of_signature[log.signature_E[launches_E]]
    host_ns_E = np.where(is_host_E, stated_ns_E, 0)
    host_ns_E[launches_E] = host_ns_of_signature[log.signature_E[launches_E]]
    if not recomputes:
        device_ns_E[log.is_recomputed_E] = host_ns_E[log.is_recomputed_E] = 0
    host_ns_E1 = np.concatenate([[0], np.cumsum(host_ns_E)])
    order_E, first_N, stop_N = _by_lane(log)
    device_ns_E1 = np.concatenate([[0], np.cumsum(device_ns_E[order_E])])

    # max(host until k + device from k on) = device until stop + max(host until k - device until k)
    lead_ns_E = host_ns_E1[1:][order_E] - device_ns_E1[:-1]
    launch_ns_N = device_ns_E1[stop_N] - host_ns_E1[log.since_N]
    launch_ns_N += _most(lead_ns_E, first_N, stop_N)
    work_ns_N = device_ns_E1[stop_N] - device_ns_E1[first_N]
    host_ns_N = host_ns_E1[log.stop_N] - host_ns_E1[log.first_N]
    return np.choose(log.path_N, [work_ns_N, launch_ns_N, host_ns_N])


def sums_over_nodes(
    log: LaunchLog, values_VS: NDArray[np.float64], *, recomputes: bool = True
) -> NDArray[np.float64]:
    """Sum ``V`` values of each signature over the launches of each node: an array (V, N).

    Nodes of the host get 0. Without ``recomputes``, what a backward pass makes a second time
    counts 0.
    """
    order_E, first_N, stop_N = _by_lane(log)
    signature_E = log.signature_E[order_E]
    counts_E = signature_E != STATED
    if not recomputes:
        counts_E &= ~log.is_recomputed_E[order_E]
    values_VE = np.where(counts_E, values_VS[:, signature_E], 0.0)
    before_VE1 = np.concatenate(
        [np.zeros((len(values_VS), 1)), np.cumsum(values_VE, axis=1)], axis=1
    )
    found = before_VE1[:, stop_N] - before_VE1[:, first_N]
    return np.where(log.path_N == NodePath.HOST, 0.0, found)


def _by_lane(
    log: LaunchLog,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Order the entries by lane, and in program order within each lane.

    In this order the entries of a node are contiguous. Also returns, for each node (N), the place
    of its first entry in this order and the place after its last.
    """
    order_E = np.argsort(log.lane_E, kind="stable")
    place_E = log.lane_E[order_E] * np.int64(log.n_entries + 1) + order_E
    lane_start_N = log.lane_N * np.int64(log.n_entries + 1)
    first_N = np.searchsorted(place_E, lane_start_N + log.first_N)
    stop_N = np.searchsorted(place_E, lane_start_N + log.stop_N)
    return order_E, first_N, stop_N


def _most(
    values_E: NDArray[np.int64], first_N: NDArray[np.int64], stop_N: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the maximum of ``values_E[first:stop]`` of each node (N).

    For a node without entries the value is arbitrary.
    """
    # reduceat reduces between each two neighbouring bounds: every second range is a node's.
    bounds = np.stack([first_N, stop_N], axis=1).ravel()
    padded = np.append(values_E, 0)
    return np.maximum.reduceat(padded, bounds)[::2] if len(bounds) else np.zeros(0, dtype=np.int64)


_ENTRY_COLUMNS = ("signature_E", "lane_E", "stated_ns_E")
_NODE_COLUMNS = ("node_N", "path_N", "lane_N", "since_N", "first_N", "stop_N")
_SCHEMA = schema_of(
    **{
        name: integers(64 if name == "stated_ns_E" else 32)
        for name in (*_ENTRY_COLUMNS, *_NODE_COLUMNS)
    }
)


def save_launch_log(log: LaunchLog, path: Path) -> None:
    """Write ``log`` to ``path``.

    Raises:
        StorageError: the file cannot be written; a file that was there before is unchanged.
    """
    columns = {}
    for name in _SCHEMA.names:
        values = getattr(log, name)
        columns[name] = list_column(np.array([0, len(values)]), values, _SCHEMA.field(name).type)
    table = pa.table(columns, schema=_SCHEMA)
    header = {
        "signatures": log.signatures,
        "recomputed": [list(astuple(part)) for part in log.recomputed],
    }
    write_table(path, table, kind="launch log", header=header)


def load_launch_log(path: Path) -> LaunchLog:
    """Read what :func:`save_launch_log` wrote.

    Raises:
        UsageError: there is no such file.
        FormatError: the file is damaged, foreign, or of another version.
    """
    table, header = read_table(path, _SCHEMA, kind="launch log")
    columns = {}
    for name in _SCHEMA.names:
        starts, values = lists(table, name)
        if len(starts) != 2:
            raise FormatError(f"{path}: column {name} must be one list; make it again")
        columns[name] = np.array(values)
    log = LaunchLog(
        signatures=header.texts("signatures"), recomputed=tuple(_recomputed(header)), **columns
    )
    _check(path, log)
    return log


def _recomputed(header: Header) -> Iterator[RecomputedPart]:
    # Logs of earlier versions do not name recomputed parts.
    rows = header.rows("recomputed", (int,) * 4) if header.has("recomputed") else []
    for row in rows:
        part = RecomputedPart(
            **dict(zip((f.name for f in fields(RecomputedPart)), row, strict=True))
        )
        if not (0 <= part.first_entry <= part.stop_entry and part.first_node <= part.stop_node):
            raise header.error("recomputed", "has a part that ends before it begins")
        yield part


def _check(path: Path, log: LaunchLog) -> None:
    """Refuse numbers with which :func:`recost` would fail or compute nonsense."""
    for names in (_ENTRY_COLUMNS, _NODE_COLUMNS):
        if len({len(getattr(log, name)) for name in names}) != 1:
            raise FormatError(f"{path}: columns {', '.join(names)} differ in length")
    most = 2**31
    ranges = {
        "signature_E": (STATED, len(log.signatures)),
        "lane_E": (HOST_ONLY, 2**15),
        "stated_ns_E": (0, LONGEST_NS),
        "node_N": (0, most),
        "path_N": (0, len(NodePath)),
        "lane_N": (0, 2**15),
        "since_N": (0, log.n_entries + 1),
        "first_N": (0, log.n_entries + 1),
        "stop_N": (0, log.n_entries + 1),
    }
    for name, (low, high) in ranges.items():
        values = getattr(log, name)
        if len(values) and not (low <= values.min() and values.max() < high):
            raise FormatError(f"{path}: {name} has numbers outside {low} … {high - 1}")
    if ((log.signature_E == STATED) != (log.stated_ns_E > 0)).any():
        raise FormatError(f"{path}: an entry has a signature and a stated time, or neither")
    if ((log.signature_E != STATED) & (log.lane_E == HOST_ONLY)).any():
        raise FormatError(f"{path}: an entry has a signature and no lane")
    if (np.diff(log.node_N) <= 0).any():
        raise FormatError(f"{path}: nodes must be in ascending order")
    if (log.since_N > log.first_N).any() or (log.first_N > log.stop_N).any():
        raise FormatError(f"{path}: a node ends before it begins")
