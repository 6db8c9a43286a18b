"""Megatron-FSDP's check that the shards of a parameter, over all ranks, cover it.

Shards are uneven there, so each rank tells its own to the others, and then all make sure that
somebody has the first row and somebody the last. Absent peers have no shards to tell of. Where the
backend is torch's ``fake`` one, the library leaves the check out by itself.
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
    """Of the library's modules, by name: within megatron-core, or by itself."""
    return dict.fromkeys(_MODULES, _without_check)


def _without_check(module: Any, undo: ExitStack) -> None:
    if hasattr(module, "validate_uneven_dtensor"):  # since 0.14
        replace(undo, module, "validate_uneven_dtensor", lambda dtensor: None)
