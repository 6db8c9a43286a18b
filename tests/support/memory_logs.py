"""Logs of a GPU's memory, a few events long."""

from __future__ import annotations

import numpy as np

from prismscale.analysis.memory.memory_log import NOBODY, Action, MemoryLog, Origin, Tables

LABELS = ("", "forward", "backward", "optimizer")
A, F = Action.ALLOC, Action.FREE_REQUESTED


def log_of(
    *events: tuple[Action, int, int, str],
    owners: dict[int, int] | None = None,
    step_starts: tuple[int, ...] = (0,),
) -> MemoryLog:
    """Of (action, address, bytes, what the program does)."""
    n = len(events)
    column = {name: np.zeros(n, dtype=np.int64) for name in ("made_by", "stream", "origin")}
    owner_E = np.full(n, NOBODY, dtype=np.int64)
    for event, owner in (owners or {}).items():
        owner_E[event] = owner
    size_E = np.array([e[2] for e in events], dtype=np.int64)
    return MemoryLog(
        rank=3,
        tables=Tables(
            ops=("aten::mm",),
            origins=(Origin("", "", False), Origin("train.py:7", "layers.2.mlp", False)),
            labels=LABELS,
            owners=(("parameters", "layers.0.weight"),),
        ),
        step_starts=step_starts,
        action_E=np.array([e[0] for e in events], dtype=np.int64),
        address_E=np.array([e[1] for e in events], dtype=np.int64),
        bytes_E=size_E,
        block_bytes_E=size_E,
        time_ns_E=np.arange(n, dtype=np.int64),
        made_by_E=column["made_by"],
        origin_E=column["origin"],
        label_E=np.array([LABELS.index(e[3]) for e in events], dtype=np.int64),
        stream_E=column["stream"],
        owner_E=owner_E,
        **{f"block_{name}_B": np.zeros(0, dtype=np.int64) for name in BLOCK_COLUMNS},
    )


BLOCK_COLUMNS = ("address", "size", "requested", "stream", "flags", "made_by")
EVENTS = (
    (A, 1, 100, ""),
    (A, 2, 10, "forward"),
    (A, 3, 20, "forward"),
    (F, 3, 20, "forward"),
    (A, 3, 30, "forward"),
    (A, 4, 40, "backward"),
    (F, 3, 30, "backward"),
    (F, 2, 10, "backward"),
)
