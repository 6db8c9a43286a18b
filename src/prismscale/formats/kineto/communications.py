"""Identifies the communication behind a NCCL kernel: operation, bytes, group.

Recent traces tell these in the kernel's own arguments, older ones in the ``record_param_comms``
span around its launch, still older ones only in an ``nccl:…`` span and the kernel's name.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prismscale.formats.kineto.events import Activity, RankEvents
from prismscale.graph.node import CollectiveOp
from prismscale.graph.parquet import MAX_WORLD_SIZE

OPERATIONS = (
    # Longer names come first, because "allreduce" contains "reduce".
    ("reducescatter", CollectiveOp.REDUCE_SCATTER),
    ("allreduce", CollectiveOp.ALL_REDUCE),
    ("allgather", CollectiveOp.ALL_GATHER),
    ("alltoall", CollectiveOp.ALL_TO_ALL),
    ("sendrecv", CollectiveOp.ALL_TO_ALL),
    ("broadcast", CollectiveOp.BROADCAST),
    ("barrier", CollectiveOp.BARRIER),
    ("scatter", CollectiveOp.SCATTER),
    ("gather", CollectiveOp.GATHER),
    ("reduce", CollectiveOp.REDUCE),
    ("send", CollectiveOp.SEND),
    ("recv", CollectiveOp.RECV),
)
MOST_ELEMENTS = 2**48
"""Upper limit of the elements of one message: 2 PB at 8 bytes each are a damaged file."""
ITEM_BYTES = {
    "double": 8,
    "long": 8,
    "longint": 8,
    "int64": 8,
    "complexfloat": 8,
    "float": 4,
    "int": 4,
    "int32": 4,
    "half": 2,
    "bfloat16": 2,
    "short": 2,
    "signedchar": 1,
    "unsignedchar": 1,
    "char": 1,
    "byte": 1,
    "bool": 1,
    "float8e4m3fn": 1,
    "float8e5m2": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledCommunication:
    """The communication that a kernel performs, as far as the trace describes it."""

    op: CollectiveOp
    n_bytes: int
    """0 where the trace does not say."""
    group: str
    """Name of the process group; empty where the trace does not say."""
    ranks: tuple[int, ...]
    """Global ranks of the group; empty where the trace does not say."""
    peer: int = -1
    """Global rank of the other side of a send or receive; -1 where the trace does not say."""


class ProfiledCommunications:
    """Finds the communication of each kernel of one rank."""

    def __init__(self, events: RankEvents) -> None:
        self._events = events
        spans: dict[str, list[Activity]] = defaultdict(list)
        for span in events.communications:
            spans[span.lane].append(span)
        self._spans = {k: sorted(v, key=lambda a: a.start_ns) for k, v in spans.items()}

    def of_kernel(self, kernel: Activity) -> ProfiledCommunication | None:
        """Return the communication that a device activity performs, or None if it is none."""
        if not kernel.name.lower().startswith(("nccl", "rccl", "void nccl", "mscclkernel")):
            return None
        spans = list(self._around(self._events.launches.get(kernel.correlation)))
        args: dict[str, Any] = {}
        for source in (*spans, kernel):
            args |= source.args
        named = [str(args.get("Collective name", "")), *(s.name for s in spans), kernel.name]
        op = next((found for n in named if (found := _operation(n)) is not None), None)
        if op is None:
            return None
        group = str(args.get("Process Group Name", ""))
        ranks = _ranks(args.get("Process Group Ranks")) or self._events.group_ranks.get(group, ())
        peer = args.get("Dst Rank" if op is CollectiveOp.SEND else "Src Rank", -1)
        return ProfiledCommunication(
            op=op,
            n_bytes=_bytes(args, op, len(ranks) or self._events.world_size or 1),
            group=group,
            ranks=ranks,
            peer=peer if isinstance(peer, int) else -1,
        )

    def _around(self, launch: Activity | None) -> Iterator[Activity]:
        """Yield communication spans of the launching thread around a launch, outermost first."""
        spans = self._spans.get(launch.lane, []) if launch else []
        if launch is None:
            return
        last = bisect_right(spans, launch.start_ns, key=lambda a: a.start_ns)
        # Spans of one communication nest two or three deep; spans further back ended long ago.
        for span in spans[max(0, last - 4) : last]:
            if span.end_ns >= launch.start_ns:
                yield span


def _operation(name: str) -> CollectiveOp | None:
    plain = "".join(c for c in name.lower() if c.isalpha())
    return next((op for word, op in OPERATIONS if word in plain), None)


def _ranks(value: Any) -> tuple[int, ...]:
    """Return the ranks of a list or of its text; empty for a long list, which the profiler cuts."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    is_list = isinstance(value, list) and all(
        isinstance(r, int) and 0 <= r < MAX_WORLD_SIZE for r in value
    )
    return tuple(value) if is_list else ()


def _bytes(args: Mapping[str, Any], op: CollectiveOp, group_size: int) -> int:
    item = ITEM_BYTES.get("".join(c for c in str(args.get("dtype", "")).lower() if c.isalnum()))
    elements = [args.get("In msg nelems"), args.get("Out msg nelems")]
    counts = [n for n in elements if isinstance(n, int) and 0 <= n < MOST_ELEMENTS]
    if item and counts:
        return item * max(counts)
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not (isinstance(dims, list) and isinstance(types, list) and dims and types):
        return 0
    kind = str(types[0]).lower().replace(" ", "").removeprefix("c10::")
    shape = dims[0] if isinstance(dims[0], list) else []
    if kind not in ITEM_BYTES or not all(isinstance(n, int) and n >= 0 for n in shape):
        return 0
    n_bytes = ITEM_BYTES[kind]
    for n in shape:
        n_bytes = min(n_bytes * n, 8 * MOST_ELEMENTS)
    return n_bytes * (group_size if op is CollectiveOp.ALL_GATHER else 1) if shape else 0
