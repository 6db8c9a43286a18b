"""Reads the events of one rank's Kineto trace (Chrome trace JSON of ``torch.profiler``).

Only what re-timing needs is kept: device activities, the runtime calls that launched them or waited
for them, spans of communications, and profiler steps. Nothing in a trace is executed.
Format: ``libkineto/src/output_json.cpp`` of pytorch/kineto; times are microseconds.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import IO, Any, TypeGuard

from prismscale.errors import FormatError, shown
from prismscale.formats.json_stream import members
from prismscale.graph.parquet import MAX_WORLD_SIZE
from prismscale.typed_files import LARGEST_INT

DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"})
RUNTIME = frozenset({"cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime"})
WAITS = ("Synchronize", "cudaMemcpy", "hipMemcpy", "cudaFree", "hipFree")
"""Parts of the names of runtime calls that may block the host until the device is done."""
_STEP_NUMBER = re.compile(r"[0-9]{1,15}")
MAX_EVENTS = 10_000_000
"""Most device and runtime events that are kept of one rank: about 2 GB."""
NO_ARGS: Mapping[str, Any] = MappingProxyType({})
READ_ARGS = (
    *("Collective name", "Process Group Name", "Process Group Ranks", "Dst Rank", "Src Rank"),
    *("dtype", "In msg nelems", "Out msg nelems", "Input Dims", "Input type"),
)
"""Arguments of communications that are read; others are not kept."""
"""One empty mapping for all activities without arguments, because there are millions of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """One event of the trace that has a start and an end, in nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    lane: str
    """Stream of a device activity, thread of a host activity."""
    correlation: int = -1
    """Number that a device activity shares with the runtime call that launched it; -1 for none."""
    args: Mapping[str, Any] = field(default_factory=lambda: NO_ARGS)
    """Arguments of the event; kept for communications only."""


@dataclass(kw_only=True)
class RankEvents:
    """The events of one rank."""

    name: str
    """Name of the file."""
    rank: int | None = None
    world_size: int | None = None
    group_ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Global ranks of each process group by name, where the trace lists them."""
    device: list[Activity] = field(default_factory=list)
    launches: dict[int, Activity] = field(default_factory=dict)
    """Runtime calls by correlation. :func:`read_events` keeps those that launched device work."""
    waits: list[Activity] = field(default_factory=list)
    communications: list[Activity] = field(default_factory=list)
    """``record_param_comms`` and ``nccl:…`` spans of host threads."""
    steps: dict[int, Activity] = field(default_factory=dict)
    """``ProfilerStep#N`` spans by N."""
    dropped: int = 0
    """Events with a negative, missing or non-numeric time."""

    def repairs(self) -> list[str]:
        """Return messages for the user; empty where nothing was wrong."""
        if not self.dropped:
            return []
        return [f"{self.name}: {self.dropped} events with impossible times dropped"]


def read_events(name: str, file: IO[bytes], *, max_events: int = MAX_EVENTS) -> RankEvents:
    """Read one rank's trace, event by event.

    Raises:
        FormatError: damaged JSON, no device activity, two profiler steps of one number, or more
            than ``max_events`` events to keep.
    """
    out = RankEvents(name=name)
    for key, value in members(name, file, "traceEvents"):
        if key == "traceEvents":
            _take(out, value)
            kept = len(out.device) + len(out.launches) + len(out.waits) + len(out.communications)
            if kept > max_events:
                raise FormatError(
                    f"{name}: more than {max_events:,} device, runtime and group events; record "
                    "fewer steps (torch.profiler.schedule) or cut the trace"
                )
        elif key == "distributedInfo" and isinstance(value, dict):
            _take_distributed(out, value)
    if not out.device:
        raise FormatError(
            f"{name}: no device activity; record with ProfilerActivity.CUDA, or this is no Kineto "
            "trace"
        )
    launched = {a.correlation for a in out.device}
    out.launches = {c: a for c, a in out.launches.items() if c in launched}
    return out


def _take_distributed(out: RankEvents, info: Mapping[str, Any]) -> None:
    out.rank, out.world_size = _whole(info.get("rank")), _whole(info.get("world_size"))
    groups = info.get("pg_config")
    for group in groups if isinstance(groups, list) else []:
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and all(_whole(r) is not None for r in ranks) and ranks:
            out.group_ranks[str(group.get("pg_name"))] = tuple(ranks)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < MAX_WORLD_SIZE else None


def _take(out: RankEvents, event: Any) -> None:
    if not isinstance(event, dict) or event.get("ph") != "X":
        return
    category, name = str(event.get("cat", "")).lower(), str(event.get("name", ""))
    is_step = name.startswith("ProfilerStep#") and not category.startswith("gpu")
    is_comm = name == "record_param_comms" or (
        name.startswith("nccl:") and not category.startswith("gpu")
    )
    if category not in DEVICE and category not in RUNTIME and not is_step and not is_comm:
        return
    activity = _activity(event, name, category)
    if activity is None:
        out.dropped += 1
    elif category in DEVICE:
        out.device.append(activity)
    elif is_step:
        number = name.removeprefix("ProfilerStep#")
        if _STEP_NUMBER.fullmatch(number) is None or int(number) in out.steps:
            raise FormatError(f"{out.name}: {shown(name)} appears twice or has no number")
        out.steps[int(number)] = activity
    elif is_comm:
        out.communications.append(activity)
    else:
        if any(word in name for word in WAITS):
            out.waits.append(activity)
        if activity.correlation >= 0:
            out.launches[activity.correlation] = activity


def _activity(event: Mapping[str, Any], name: str, category: str) -> Activity | None:
    start, duration = event.get("ts"), event.get("dur", 0)
    if not _is_time(start) or not _is_time(duration):
        return None
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    correlation = args.get("correlation", -1)
    if not isinstance(correlation, int) or abs(correlation) > LARGEST_INT:
        correlation = -1
    is_device = category in DEVICE
    lane = args.get("stream", event.get("tid")) if is_device else event.get("tid")
    keep_args = name == "record_param_comms" or "nccl" in name.lower()
    start_ns = round(start * 1000)
    return Activity(
        # Millions of activities share a few hundred names.
        name=sys.intern(name),
        start_ns=start_ns,
        end_ns=start_ns + round(duration * 1000),
        lane=sys.intern(str(lane)),
        correlation=correlation,
        args={k: args[k] for k in READ_ARGS if k in args} if keep_args else NO_ARGS,
    )


def _is_time(value: Any) -> TypeGuard[float]:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and 0 <= value < 2**52
