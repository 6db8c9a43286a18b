"""Changes saves of ``torch.distributed.checkpoint`` and megatron-core for a rank without peers.

torch writes an asynchronous checkpoint in a thread, or in a process of its own that joins a gloo
world of all ranks. That world has no other member here, so the process's work is done where its
thread would be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from prismscale.emulation.after_import import Change, replace
from prismscale.emulation.background import in_background
from prismscale.payload import save_shares

_PACKAGE = "torch.distributed.checkpoint"


def changes() -> Mapping[str, Change]:
    """Return the changes to torch's and megatron-core's modules, by module name."""
    return {
        f"{_PACKAGE}._async_thread_executor": _change_thread,
        f"{_PACKAGE}._async_process_executor": _change_process,
        f"{_PACKAGE}.default_planner": _change_planner,
        "megatron.core.dist_checkpointing.validation": _change_validation,
    }


class NoProcessGroupInit:
    """Replaces ``_ProcessGroupInitInfo``.

    The coordinator broadcasts where the processes would meet; none of them uses the answer.
    """

    def __init__(self, process_group: Any = None) -> None:
        """Broadcast on all ranks of ``process_group``, as the program itself would."""
        from torch.distributed.checkpoint.utils import _DistWrapper

        ranks = _DistWrapper(process_group, use_dist=True, coordinator_rank=0)
        ranks.broadcast("get_master_addr_and_port", lambda: ("127.0.0.1", 29_500))


class CheckpointThread:
    """Replaces ``_AsyncCheckpointProcess``: saves in the calling thread, as background work."""

    def __init__(self, pg_init_info: Any) -> None:
        """``pg_init_info``: where the processes would meet; not used."""

    def save(self, staged_state_dict: Any, **named: Any) -> Any:
        """Save and return the metadata on the coordinator, None elsewhere."""
        from torch.distributed.checkpoint.state_dict_saver import save

        with in_background():
            return save(staged_state_dict, **named)


def _change_thread(module: Any, undo: ExitStack) -> None:
    replace(undo, module, "save_wrapper", _backgrounded(module.save_wrapper))


def _change_process(module: Any, undo: ExitStack) -> None:
    replace(undo, module, "_ProcessGroupInitInfo", NoProcessGroupInit)
    replace(undo, module, "_AsyncCheckpointProcess", CheckpointThread)
    replace(undo, module, "_CHECKPOINT_PROCESS", None)


def _change_planner(module: Any, undo: ExitStack) -> None:
    original = module.DefaultSavePlanner.create_local_plan

    @functools.wraps(original)
    def create_local_plan(planner: Any) -> Any:
        plan = original(planner)
        save_shares.remember(planner, plan)
        return plan

    replace(undo, module.DefaultSavePlanner, "create_local_plan", create_local_plan)


def _change_validation(module: Any, undo: ExitStack) -> None:
    """Drop the check that all ranks together save each tensor once: one rank cannot make it."""
    replace(undo, module, "validate_sharding_integrity", lambda *arguments, **named: None)


def _backgrounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        with in_background():
            return function(*arguments, **named)

    return run
