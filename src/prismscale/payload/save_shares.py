"""Decides which of the tensors that several ranks hold this rank saves.

The coordinator of a save gets every rank's plan and leaves each tensor in one of the plans that
have it: the one that is smallest so far, or the first one if the planner wants that (torch's
``dedup_save_plans``). Here there is only one plan, and the peers' plans are taken to be like it. So
the coordinator's choice is computed among the replicas of a tensor: the ranks along the replicated
axes of its mesh, or all ranks for a tensor that is not distributed. Tensors with different numbers
of replicas are shared out separately, while torch balances all of them together. Objects other than
tensors are on all ranks, unless a key names the rank (``dp_rank_3``).

megatron-core has an order of its own: of the replicas only the main one is in a plan.
"""

from __future__ import annotations

import heapq
import re
import threading
from typing import Any

from torch import distributed as dist

_here = threading.local()
_OF_ONE_RANK = re.compile(r"rank[_.-]?\d")


def remember(planner: Any, plan: Any) -> None:
    """Note this rank's plan, made by ``planner``, and which of its items other ranks save."""
    if type(planner).__name__ == "MCoreSavePlanner":
        _here.others = set()
        return
    loads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    others: set[Any] = set()
    for item in plan.items:
        key = item.index.fqn
        n_replicas, mine = _replicas(key, planner.state_dict.get(key))
        if n_replicas == 1:
            continue
        if getattr(planner, "dedup_save_to_lowest_rank", False):
            if mine:
                others.add(item.index)
            continue
        load = loads.setdefault((n_replicas, mine), [(0, k) for k in range(n_replicas)])
        n_bytes, least = load[0]
        heapq.heapreplace(load, (n_bytes + (item.tensor_storage_size() or 1), least))
        if least != mine:
            others.add(item.index)
    _here.others = others


def own_items(items: list[Any]) -> list[Any]:
    """Return the items of the last plan remembered that this rank saves."""
    others: set[Any] = getattr(_here, "others", set())
    return [item for item in items if item.index not in others]


def _replicas(key: str, value: Any) -> tuple[int, int]:
    """Return how many ranks hold the same part of ``value``, and this rank's place among them."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        n_replicas, mine = 1, 0
        coordinate = value.device_mesh.get_coordinate() or [0] * value.device_mesh.ndim
        for axis, placement in enumerate(value.placements):
            if placement.is_replicate():
                n = value.device_mesh.size(axis)
                n_replicas, mine = n_replicas * n, mine * n + coordinate[axis]
        return n_replicas, mine
    if isinstance(value, ShardedTensor) or _OF_ONE_RANK.search(key):
        return 1, 0
    return dist.get_world_size(), dist.get_rank()
