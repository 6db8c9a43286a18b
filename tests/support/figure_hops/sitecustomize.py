"""Where a figure goes: the files of the package that have it at hand, in every Python process.

A folder on ``PYTHONPATH`` that holds a module of this name has it imported by each interpreter as
it starts. A function has the figure at hand when it takes it, holds it, or is given it by a call:
as a number, or within containers and dataclasses. A whole trace does not count: who passes one on
need not look at what is in it.

Environment variables: ``HOPS_FILE`` takes a line for each process and file, time first;
``HOPS_LEAST`` and ``HOPS_BELOW`` are the range of numbers that only the figure lies in.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import FrameType

SOURCE = "/src/prismscale/"
DEEPEST, LONGEST = 6, 1000
WHOLES = frozenset({"RankTrace"})
NOTES = os.environ.get("HOPS_FILE", "")
LEAST, BELOW = (int(os.environ.get(name, "0")) for name in ("HOPS_LEAST", "HOPS_BELOW"))
_seen: set[str] = set()


def holds(value: object, depth: int = DEEPEST) -> bool:
    """Whether the figure is in ``value``."""
    kind = type(value)
    if kind is int:
        return LEAST <= value < BELOW  # type: ignore[operator]
    if depth == 0 or kind.__name__ in WHOLES:
        return False
    inner: object = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, (tuple, list)):
        inner = value[:LONGEST]
    elif hasattr(kind, "__dataclass_fields__"):
        inner = [getattr(value, name, None) for name in kind.__dataclass_fields__]
    return any(holds(one, depth - 1) for one in inner)  # type: ignore[attr-defined]


def _note(frame: FrameType | None) -> None:
    name = frame.f_code.co_filename.partition(SOURCE)[2] if frame is not None else ""
    if name and name not in _seen:
        _seen.add(name)
        # At once: a forked rank ends without its interpreter's farewell.
        with open(NOTES, "a") as notes:
            notes.write(f"{time.monotonic_ns()} {name}\n")


def _watch(frame: FrameType, event: str, argument: object) -> None:
    if event not in ("call", "return") or SOURCE not in frame.f_code.co_filename:
        return
    is_here = any(map(holds, list(frame.f_locals.values())))
    if event == "call" and is_here:
        _note(frame.f_back)
        _note(frame)
    elif event == "return" and holds(argument):
        _note(frame)
        _note(frame.f_back)
    elif is_here:
        _note(frame)


if NOTES:
    sys.setprofile(_watch)
