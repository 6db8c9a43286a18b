"""Drops Megatron-FSDP's check that the shards of a parameter, over all ranks, cover it.

Shards are uneven there, so each rank sends its own to the others, and then all make sure that some
rank has the first row and some rank the last. Absent peers have no shards to report. With torch's
``fake`` backend the library itself skips the check.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from prismscale.emulation.after_import import Change, replace

_MODULES = (
    "megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor",
    "megatron_fsdp.uneven_dtensor",
)


def changes() -> Mapping[str, Change]:
    """Return the changes by module name, for the library within megatron-core and on its own."""
    return dict.fromkeys(_MODULES, _without_check)


def _without_check(module: Any, undo: ExitStack) -> None:
    if hasattr(module, "validate_uneven_dtensor"):  # since 0.14
        replace(undo, module, "validate_uneven_dtensor", lambda dtensor: None)
