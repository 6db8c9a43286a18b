"""A separate process that ends what its owner leaves behind, even if the owner is killed outright.

The owner writes lines ``+session PID``, ``-session PID``, ``+folder PATH``, ``-folder PATH`` into a
pipe; ``+users PATH`` stands for a folder and the processes that have files open in it. The pipe
ends when the owner ends, in whatever way. Then the reaper ends or removes everything still listed.
Only the standard library is imported here: the file is run by path, without our package, in some
15 ms.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_LOOKS, _BETWEEN_LOOKS_S = 3, 0.1


class Reaper:
    """The owner's handle on its reaper process.

    Args:
        detached: make it no child of this process, for owners whose children somebody kills first.
    """

    def __init__(self, *, detached: bool = False) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), *(["detached"] * detached)],
            stdin=subprocess.PIPE,
            # Ends with the reaper, so a detached one can be waited for too.
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if detached:
            self._process.wait()

    def add(self, kind: str, what: int | Path) -> None:
        """List a ``session``, a ``folder``, or a folder and its ``users``."""
        self._tell(f"+{kind} {what}\n")

    def remove(self, kind: str, what: int | Path) -> None:
        """Take an entry off the list, because it is gone."""
        self._tell(f"-{kind} {what}\n")

    def close(self) -> None:
        """End the reaper, and with it whatever is still listed."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        if pipe is None:
            return
        # Somebody may have killed the reaper: then only the kernel's signal to orphans is left.
        with contextlib.suppress(BrokenPipeError):
            pipe.write(os.fsencode(line))
            # Flush now, not when the buffer is full: we may be killed next.
            pipe.flush()


@contextlib.contextmanager
def guarded_folder(prefix: str, parent: str | None = None) -> Iterator[Path]:
    """A temporary folder. At the end, processes with open files in it are killed, then it goes.

    So it is even if this process is killed first.

    Args:
        prefix: start of the folder's name.
        parent: where to make it; None: where temporary files are.

    Raises:
        OSError: it cannot be made.
    """
    folder = Path(parent or tempfile.gettempdir()) / f"{prefix}{secrets.token_hex(4)}"
    # A process of Ray kills its children before it ends.
    reaper = Reaper(detached=True)
    # Listed before it is made: however soon we are killed, it does not stay behind.
    reaper.add("users", folder)
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        reaper.close()


def guard(lines: Iterable[bytes], owner: int) -> None:
    """Follow the list until the pipe of ``owner`` ends, then end everything on it."""
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
    for kind, what in listed:
        if kind == b"users":
            _end_users(Path(os.fsdecode(what)), owner)
    # Folders last: no process is left that would write to them again.
    for kind, what in listed:
        if kind in (b"folder", b"users"):
            shutil.rmtree(os.fsdecode(what), ignore_errors=True)


def _end_users(folder: Path, owner: int) -> None:
    """Kill all processes with open files in ``folder``, until several looks in a row find none.

    A killed process may just have started another one.
    """
    looks = 0
    while looks < _LOOKS:
        looks += 1
        for process in Path("/proc").glob("[0-9]*"):
            # The owner may have files open there, and lives on.
            if int(process.name) != owner and _uses(process, folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process.name), signal.SIGKILL)
                looks = 0
        time.sleep(_BETWEEN_LOOKS_S)


def _uses(process: Path, folder: Path) -> bool:
    # The process may end meanwhile, or belong to another user.
    with contextlib.suppress(OSError):
        return any(file.readlink().is_relative_to(folder) for file in (process / "fd").iterdir())
    return False


if __name__ == "__main__":
    if "detached" in sys.argv and os.fork():
        os._exit(0)
    guard(sys.stdin.buffer, int(sys.argv[1]))
