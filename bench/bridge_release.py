"""Recipes of a Megatron-Bridge release, as its own launcher starts them."""

from __future__ import annotations

import re
from pathlib import Path

from runs import HERE

_NUMBER = re.compile(r"^(?:MAJOR|MINOR) = (\d+)$", re.MULTILINE)


def release_of(bridge: Path) -> str:
    """Return the release of a checkout, such as ``0.5``.

    Raises:
        SystemExit: DIR is no checkout of Megatron-Bridge.
    """
    file = bridge / "src" / "megatron" / "bridge" / "package_info.py"
    try:
        return ".".join(_NUMBER.findall(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise SystemExit(f"{bridge} is no checkout of Megatron-Bridge: {error}") from error


def launch_command(
    bridge: Path, *, family: str, model: str, gpu: str, gpus: int, precision: str
) -> tuple[object, ...]:
    """Return the recipe's command, as behind ``torchrun``."""
    return (
        HERE / "programs" / "bridge_launch.py",
        bridge / "scripts" / "performance",
        *("--model_family_name", family, "--model_recipe_name", model),
        *("--gpu", gpu, "--num_gpus", gpus),
        *("--compute_dtype", precision, "--task", "pretrain"),
    )
