"""Save plans of ``torch.distributed.checkpoint`` where only one rank's plan is real.

Ranks send their save plans to a coordinator, which divides replicated tensors among them, checks
that together they cover every tensor, names each rank's files, and answers each rank. Mirrored
plans would be divided with ranks that save nothing, and an absent coordinator answers nobody. A
rank is to save exactly what it would among its peers. So absent ranks' plans are emptied here, its
own plan is cut to its share (:mod:`prismscale.payload.save_shares`), the check of the whole is
skipped, and the file names of an absent coordinator are supplied.

After the save, ranks tell the coordinator what they wrote, and it tells all of them. Ranks that run
here, captured or live, take part in no common checkpoint: the coordinator hears of its own part
only.

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
    """Correct what the coordinator ``rank`` gathered from mirrored peers.

    Of save plans, those of other ranks become empty. Of reports on what was written, all ranks' are
    the coordinator's own.
    """
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
            if is_one_rank:  # let it answer that nothing is wrong: True, since torch 2.13 []
                metadata = dataclasses.replace(metadata, state_dict_metadata={})
            return check(global_plan, metadata)

        planner._validate_global_plan = check_unless_emulated


def restore() -> None:
    """Restore torch's own check."""
    planner: Any = sys.modules.get(f"{_PACKAGE}.default_planner")
    if planner is not None:
        check = planner._validate_global_plan
        planner._validate_global_plan = getattr(check, "__wrapped__", check)


def is_plan(item: Any) -> bool:
    """Return whether ``item`` is a save plan."""
    planner: Any = sys.modules.get(f"{_PACKAGE}.default_planner")
    return planner is not None and isinstance(item, planner.SavePlan)


def coordinated(reply: Any) -> Any:
    """Return what the coordinator would answer to a save plan; any other object as it is."""
    planner: Any = sys.modules.get(f"{_PACKAGE}.default_planner")
    files: Any = sys.modules.get(f"{_PACKAGE}.filesystem")
    if planner is None or files is None or not isinstance(reply, planner.SavePlan):
        return reply
    if reply.storage_data is not None:
        return dataclasses.replace(reply, items=save_shares.own_items(reply.items))
    prefix = files._StoragePrefix(f"__{dist.get_rank()}_")
    items = save_shares.own_items(reply.items)
    return dataclasses.replace(reply, items=items, storage_data=prefix)
