"""The versions of torch that this prismscale is tested with, and the installed one.

The installed version is read from the package's metadata, because importing torch takes seconds.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from typing import Any

OLDEST = (2, 11)
NEWEST = (2, 15)
"""Oldest and newest version in the test matrix (``make test-matrix``)."""
CUDNN = 91501
"""Version of cuDNN whose rules the null device follows."""


def renamed(owner: Any, now: str, before: str) -> Any:
    """Return the attribute ``now`` of ``owner``, or ``before``, its name in an older torch.

    A newer torch warns about the old name.
    """
    return getattr(owner, now, None) or getattr(owner, before)


def installed_torch() -> str | None:
    """Return the version of the installed torch (``2.15.0+cu132``); None if there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


@cache
def installed_cudnn() -> int:
    """Return the version of the cuDNN that a CUDA build of torch brings (9.15.1 is 91501).

    :data:`CUDNN` where none is installed.
    """
    for package in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            numbers = re.findall(r"\d+", metadata.version(package))[:3]
        except metadata.PackageNotFoundError:
            continue
        major, minor, patch = map(int, numbers)
        return major * 10_000 + minor * 100 + patch
    return CUDNN


def release_of(version: str | None) -> tuple[int, int] | None:
    """Return the major and minor number of ``version``; None if it has none."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def supported_versions() -> str:
    """Return the range of tested versions as text."""
    return f"{_text(OLDEST)} … {_text(NEWEST)}"


def torch_remark(version: str | None = None) -> str | None:
    """Return a remark on a torch that was not tested; None if it was, or if there is no torch.

    Args:
        version: version of torch; None for the installed one.
    """
    version = version or installed_torch()
    release = release_of(version)
    if release is None:
        return None
    if OLDEST <= release <= NEWEST:
        return None
    age = "newer" if release > NEWEST else "older"
    return (
        f"torch {version} is {age} than the versions this prismscale is tested with "
        f"({supported_versions()}); it tries. If something fails: "
        f"pip install 'torch=={_text(NEWEST)}.*'"
    )


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
