"""``torch.distributed.checkpoint`` where only one rank's plan is real.

Ranks send their save plans to a coordinator, which divides replicated tensors among them, checks
that together they cover every tensor, names each rank's files, and answers each rank. Mirrored
plans would be divided with ranks that save nothing, and an absent coordinator answers nobody. So
that a rank saves exactly its own shards, absent ranks' plans are emptied here, the check of the
whole is left out where they are, and the absent coordinator's file names are given.

The checkpoint modules are looked up when used, because a program may import them at any time.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

from torch import distributed as dist

_PACKAGE = "torch.distributed.checkpoint"


def correct_plans(gathered: list[Any], rank: int) -> None:
    """Empty the save plans of absent ranks in what the coordinator ``rank`` gathered."""
    planner: Any = sys.modules.get(f"{_PACKAGE}.default_planner")
    if planner is None or not isinstance(gathered[rank], planner.SavePlan):
        return
    for k, plan in enumerate(gathered):
        if k != rank:
            gathered[k] = dataclasses.replace(plan, items=[])
    check = planner._validate_global_plan
    if not hasattr(check, "__wrapped__"):

        @functools.wraps(check)
        def check_unless_emulated(global_plan: Any, metadata: Any) -> Any:
            is_one_rank = len(global_plan) > 1 and sum(bool(p.items) for p in global_plan) == 1
            return [] if is_one_rank else check(global_plan, metadata)

        planner._validate_global_plan = check_unless_emulated


def restore() -> None:
    """Put torch's own check back."""
    planner: Any = sys.modules.get(f"{_PACKAGE}.default_planner")
    if planner is not None:
        check = planner._validate_global_plan
        planner._validate_global_plan = getattr(check, "__wrapped__", check)


def coordinated(reply: Any) -> Any:
    """What the coordinator would answer to this rank's object, if it is a save plan."""
    planner: Any = sys.modules.get(f"{_PACKAGE}.default_planner")
    files: Any = sys.modules.get(f"{_PACKAGE}.filesystem")
    if planner is None or files is None or not isinstance(reply, planner.SavePlan):
        return reply
    if reply.storage_data is not None:
        return reply
    prefix = files._StoragePrefix(f"__{dist.get_rank()}_")
    return dataclasses.replace(reply, storage_data=prefix)
