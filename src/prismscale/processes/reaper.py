"""Ends what is left when its owner is killed outright: a process of its own that keeps a list.

The owner writes lines ``+session PID``, ``-session PID``, ``+folder PATH``, ``-folder PATH`` into a
pipe. The pipe ends when the owner does, however it ends, and everything still listed goes. Only the
standard library is imported here: the file is run by path, without our package, in some 15 ms.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


class Reaper:
    """The owner's side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, kind: str, what: int | Path) -> None:
        """List a ``session`` or a ``folder``."""
        self._tell(f"+{kind} {what}\n")

    def remove(self, kind: str, what: int | Path) -> None:
        """It is gone."""
        self._tell(f"-{kind} {what}\n")

    def close(self) -> None:
        """End the reaper, and with it whatever is still listed."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        if pipe is None:
            return
        # Somebody may have killed it: then the kernel's signal to orphans is what is left.
        with contextlib.suppress(BrokenPipeError):
            pipe.write(os.fsencode(line))
            # Now, not when the buffer is full: we may be killed next.
            pipe.flush()


def guard(lines: Iterable[bytes]) -> None:
    """Follow the list to its end, then end what is on it."""
    listed: dict[tuple[bytes, bytes], None] = {}
    for line in lines:
        kind, _, what = line[1:].rstrip(b"\n").partition(b" ")
        if line.startswith(b"+"):
            listed[kind, what] = None
        else:
            listed.pop((kind, what), None)
    for kind, what in listed:
        if kind == b"session":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(int(what), signal.SIGKILL)
    # Folders last: nobody is left who would write to them again.
    for kind, what in listed:
        if kind == b"folder":
            shutil.rmtree(os.fsdecode(what), ignore_errors=True)


if __name__ == "__main__":
    guard(sys.stdin.buffer)
