"""Programs that replace their process by another Python program, or by themselves (``os.exec``).

Launchers do this after they have set variables that libraries read when they are imported. They
call ``os.execvpe(sys.executable, [sys.executable, script, ...], environment)``. The new interpreter
would not know which rank its process is, so it is made to begin as that rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

RankAnew = Callable[[Sequence[str]], Sequence[str] | None]
"""Maps an interpreter's arguments to those with which it begins as the same rank.

Returns None if they name no program that a rank can run.
"""
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Options of the interpreter whose value is the next word."""


@contextmanager
def followed_when_replaced(anew: RankAnew) -> Iterator[None]:
    """Inside the context, a Python that replaces this process begins as ``anew`` says.

    All ``os.exec*`` functions end in the two functions that are patched here. A program other than
    this Python replaces the process unchanged.
    """
    before = os.execv, os.execve

    def follow(path: Any, arguments: Sequence[Any]) -> Any:
        words = [os.fsdecode(word) for word in arguments[1:]]
        ours = anew(words) if _is_this_python(path) else None
        return arguments if ours is None else [arguments[0], *ours]

    def execv(path: Any, arguments: Sequence[Any]) -> None:
        before[0](path, follow(path, arguments))

    def execve(path: Any, arguments: Sequence[Any], environment: Mapping[Any, Any]) -> None:
        before[1](path, follow(path, arguments), environment)

    os.execv, os.execve = execv, execve  # type: ignore[assignment]
    try:
        yield
    finally:
        os.execv, os.execve = before


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off an interpreter's own options. The rest begins with ``-m``, ``-c`` or a file."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c", "-"):
        at += 2 if words[at] in _WITH_VALUE else 1
    return list(words[:at]), list(words[at:])


def _is_this_python(path: Any) -> bool:
    # The file behind a descriptor is not known.
    if isinstance(path, int):
        return False
    try:
        return os.path.samefile(path, sys.executable)
    except OSError:
        return False
