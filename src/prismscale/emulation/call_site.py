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
    # Its wrapper is around what torch has deprecated.
    typing_extensions.__file__,
    "<",
)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_MOST_CALLERS = 64
"""Between a payload rule and the program's own function lie about twenty frames of ours and of
torch's process group, and a few of the framework's."""
_is_users: dict[str, bool] = {}


def call_site() -> str:
    """``file:line`` of the innermost frame that is neither torch's, ours, nor the standard
    library's; empty where there is none (a helper thread).

    The path is relative to the working folder, or to ``site-packages``, where it lies there.
    """
    frame = users_frame(sys._getframe(1))
    return line_of(frame) if frame is not None else ""


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from ``frame`` outwards that is the user's; None where none is."""
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
    """``file:line``, as people are shown it."""
    return f"{_shorten(frame.f_code.co_filename)}:{frame.f_lineno}"


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """``frame`` and who called it: as far as torch's own code lies between it and a caller."""
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
