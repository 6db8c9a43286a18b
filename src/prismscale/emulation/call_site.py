"""Where in the user's program a communication was called."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

import torch
import typing_extensions

_SITE_PACKAGES = os.sep + "site-packages" + os.sep
_OURS_AND_TORCH = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parents[1]) + os.sep,
    # torch's deprecated functions run inside a wrapper of this package.
    typing_extensions.__file__,
    "<",
)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_MOST_CALLERS = 64
"""Most frames that :func:`callers` yields. Between a payload rule and the program's own function
lie about twenty frames of ours and of torch's process group, and a few of the framework's."""
_is_users: dict[str, bool] = {}


def call_site() -> str:
    """Return ``file:line`` of the innermost frame of the user's code.

    That is code of neither torch, prismscale nor the standard library. The answer is empty if there
    is no such frame (a helper thread). The path is relative to the working folder or to
    ``site-packages`` if it lies in one of them.
    """
    frame = users_frame(sys._getframe(1))
    return line_of(frame) if frame is not None else ""


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's code from ``frame`` outwards; None if none is."""
    while frame is not None:
        name = frame.f_code.co_filename
        users = _is_users.get(name)
        if users is None:
            # A virtual environment may lie inside the standard library's folder.
            stdlib = name.startswith(_STDLIB) and _SITE_PACKAGES not in name
            users = _is_users[name] = not (stdlib or name.startswith(_OURS_AND_TORCH))
        if users:
            return frame
        frame = frame.f_back
    return None


def line_of(frame: FrameType) -> str:
    """Return ``file:line`` in the form shown to people."""
    return f"{_shorten(frame.f_code.co_filename)}:{frame.f_lineno}"


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield ``frame`` and its callers, far enough to reach beyond torch's own frames."""
    for _ in range(_MOST_CALLERS):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


@cache
def _shorten(filename: str) -> str:
    if _SITE_PACKAGES in filename:
        return filename.split(_SITE_PACKAGES, 1)[1]
    relative = os.path.relpath(filename)
    return filename if relative.startswith("..") else relative
