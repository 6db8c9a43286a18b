"""FlashAttention from Hugging Face's hub: ``kernels.get_kernel("kernels-community/flash-attn3")``.

A program that asks for this kernel downloads a binary and its Python code when it begins. On the
null device it gets a stand-in, whether there is a network or not. Requests for other kernels go to
the ``kernels`` library.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from prismscale.devices.null.custom_kernels import Watcher
from prismscale.devices.null.libraries.flash_attention import flash_attention_3, hub_interface
from prismscale.devices.null.libraries.import_finder import StandInFinder

REPOSITORIES = ("flash-attn3", "flash-attention-3")
"""Names of the repositories, whose owner does not matter."""
_GENERATIONS = (8, 9)
"""Compute capabilities that FlashAttention 3 is built for."""


def serve_hub(finder: StandInFinder) -> None:
    """Replace the functions of ``kernels`` once it is imported."""
    Watcher({"kernels": partial(_serve, finder)}).begin()


def _serve(finder: StandInFinder, kernels: Any) -> None:
    from_hub, is_on_hub = kernels.get_kernel, kernels.has_kernel

    def get_kernel(repo_id: str, *arguments: Any, **named: Any) -> Any:
        """Return the stand-in if there is one for ``repo_id``, otherwise the hub's kernel."""
        if not _is_known(repo_id):
            return from_hub(repo_id, *arguments, **named)
        _check(named)
        if not _is_built():
            raise RuntimeError(f"{repo_id} has no build for {torch.cuda.get_device_name()}")
        flash_attention_3.loaded(finder)
        return hub_interface.interface()

    def has_kernel(repo_id: str, *arguments: Any, **named: Any) -> bool:
        """Return whether the hub has a build for the GPU."""
        if not _is_known(repo_id):
            return bool(is_on_hub(repo_id, *arguments, **named))
        _check(named)
        return _is_built()

    kernels.get_kernel, kernels.has_kernel = get_kernel, has_kernel


def _is_known(repo_id: str) -> bool:
    return repo_id.rpartition("/")[2] in REPOSITORIES


def _check(named: dict[str, Any]) -> None:
    """Let newer versions of ``kernels``, which want a revision or a version, check for it."""
    versions: Any = sys.modules.get("kernels._versions")
    if hasattr(versions, "revision_or_version"):
        versions.revision_or_version(revision=named.get("revision"), version=named.get("version"))


def _is_built() -> bool:
    return torch.cuda.get_device_capability()[0] in _GENERATIONS
