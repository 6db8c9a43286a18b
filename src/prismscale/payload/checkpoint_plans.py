"""``torch.distributed.checkpoint`` where only one rank's plan is real.

Ranks send their save plans to a coordinator, which divides replicated tensors among them, checks
that together they cover every tensor, names each rank's files, and answers each rank. Mirrored
plans would be divided with ranks that save nothing, and an absent coordinator answers nobody. So
that a rank saves exactly what it would among its peers, absent ranks' plans are emptied here and
its own is cut to its share (:mod:`prismscale.payload.save_shares`), the check of the whole is left
out, and the absent coordinator's file names are given.

Then they tell the coordinator what they wrote, which it tells all. Ranks that run here, captured or
live, are in no checkpoint together: it hears of its own part only.

The checkpoint modules are looked up when used, because a program may import them at any time.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

from torch import distributed as dist

from prismscale.payload import save_shares

_PACKAGE = "torch.distributed.checkpoint"


def correct_gathered(gathered: list[Any], rank: int) -> None:
    """Correct what the coordinator ``rank`` gathered: if it is save plans, those of other ranks are
    empty; if it is what they wrote, all wrote the same."""
    storage: Any = sys.modules.get(f"{_PACKAGE}.storage")
    if storage is not None and _are_all(gathered[rank], storage.WriteResult):
        gathered[:] = [gathered[rank]] * len(gathered)
    else:
        _correct_plans(gathered, rank)


def _are_all(items: Any, kind: type[Any]) -> bool:
    return isinstance(items, list) and bool(items) and all(isinstance(i, kind) for i in items)


def _correct_plans(gathered: list[Any], rank: int) -> None:
    planner: Any = sys.modules.get(f"{_PACKAGE}.default_planner")
    if planner is None or not isinstance(gathered[rank], planner.SavePlan):
        return
    for k, plan in enumerate(gathered):
        items = save_shares.own_items(plan.items) if k == rank else []
        gathered[k] = dataclasses.replace(plan, items=items)
    check = planner._validate_global_plan
    if not hasattr(check, "__wrapped__"):

        @functools.wraps(check)
        def check_unless_emulated(global_plan: Any, metadata: Any) -> Any:
            is_one_rank = len(global_plan) > 1 and sum(bool(p.items) for p in global_plan) == 1
            if is_one_rank:  # what it answers where nothing is wrong: True, since torch 2.13 []
                metadata = dataclasses.replace(metadata, state_dict_metadata={})
            return check(global_plan, metadata)

        planner._validate_global_plan = check_unless_emulated


def restore() -> None:
    """Put torch's own check back."""
    planner: Any = sys.modules.get(f"{_PACKAGE}.default_planner")
    if planner is not None:
        check = planner._validate_global_plan
        planner._validate_global_plan = getattr(check, "__wrapped__", check)


def is_plan(item: Any) -> bool:
    """Whether ``item`` is a save plan."""
    planner: Any = sys.modules.get(f"{_PACKAGE}.default_planner")
    return planner is not None and isinstance(item, planner.SavePlan)


def coordinated(reply: Any) -> Any:
    """What the coordinator would answer to this rank's object, if it is a save plan."""
    planner: Any = sys.modules.get(f"{_PACKAGE}.default_planner")
    files: Any = sys.modules.get(f"{_PACKAGE}.filesystem")
    if planner is None or files is None or not isinstance(reply, planner.SavePlan):
        return reply
    if reply.storage_data is not None:
        return dataclasses.replace(reply, items=save_shares.own_items(reply.items))
    prefix = files._StoragePrefix(f"__{dist.get_rank()}_")
    items = save_shares.own_items(reply.items)
    return dataclasses.replace(reply, items=items, storage_data=prefix)
