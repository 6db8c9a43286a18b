"""Programs that put another Python program, or themselves, in the place of their process.

A launcher that sets variables which libraries read when they are imported does so: it calls
``os.execvpe(sys.executable, [sys.executable, script, ...], environment)``. The new interpreter
would know nothing of the rank that its process is, so it is made to begin as that rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

RankAnew = Callable[[Sequence[str]], Sequence[str] | None]
"""From the arguments of an interpreter to those with which it begins as the same rank; None where
they name no program that a rank can run."""
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Options of the interpreter that take the word after them."""


@contextmanager
def followed_when_replaced(anew: RankAnew) -> Iterator[None]:
    """Meanwhile, a Python that takes this process's place begins as ``anew`` says.

    All of ``os.exec*`` end in the two functions that are replaced here. What is no Python, or not
    this one, takes the place as it is.
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
    """An interpreter's own options, and the words from its program on: ``-m``, ``-c`` or a file."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c", "-"):
        at += 2 if words[at] in _WITH_VALUE else 1
    return list(words[:at]), list(words[at:])


def _is_this_python(path: Any) -> bool:
    # A file descriptor names no file that is known.
    if isinstance(path, int):
        return False
    try:
        return os.path.samefile(path, sys.executable)
    except OSError:
        return False
