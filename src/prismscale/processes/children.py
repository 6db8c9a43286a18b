"""Child processes that never outlive us: each has a session, which is ended as a whole.

A rank's process may have children of its own (data-loader workers), so a rank is a session, and
ending it ends the session. If we are killed outright, the kernel ends the rank
(``PR_SET_PDEATHSIG``), and a :class:`.Reaper` ends its session and removes the shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn, Protocol

from prismscale.errors import StorageError
from prismscale.processes.reaper import Reaper

PR_SET_PDEATHSIG = 1
GRACE_S = 3.0
"""Time between asking a process to end and killing it."""
MOST_TAIL_BYTES = 1 << 16
"""Most bytes of a log in which its last lines are looked for: a program may print without end."""


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent dies (on Linux; elsewhere nothing)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One process of a job: ``python -m module arguments``."""

    name: str
    module: str
    arguments: tuple[str, ...]
    log: Path
    """File of the process's output."""
    slot: int | None = None
    """Number of the rank among those that run side by side, from 0; None if it is no rank."""


class Process(Protocol):
    """The part of ``subprocess.Popen`` that is needed of a child."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """The exit code once the process has ended, negative for a signal; None before."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; ``subprocess.TimeoutExpired`` if it takes longer."""


@dataclass(kw_only=True)
class Child:
    """A running process and its log."""

    name: str
    process: Process
    log: Path
    began: float = field(default_factory=time.monotonic)

    def log_tail(self, lines: int = 12) -> str:
        """The end of the child's output."""
        return log_tail(self.log, lines)


class Children:
    """A context in which processes run; leaving it ends all that still do."""

    def __init__(self, *, detached: bool = False) -> None:
        """``detached``: see :class:`.Reaper`."""
        self._detached = detached
        self._running: list[Child] = []
        self._folders: list[Path] = []
        self._reaper: Reaper | None = None

    def __enter__(self) -> Children:
        self._reaper = Reaper(detached=self._detached)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.end_all()
            # After the processes have ended: they would go on writing there.
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)
                self._forget("folder", folder)
        finally:
            if self._reaper is not None:
                self._reaper.close()

    def shared_folder(self) -> Path:
        """Create a folder in shared memory that is removed when the processes have ended.

        Raises:
            StorageError: it cannot be created.
        """
        memory = Path("/dev/shm")
        base = memory if memory.is_dir() else Path(tempfile.gettempdir())
        folder = base / f"prismscale-{os.getpid()}-{secrets.token_hex(4)}"
        # Listed before it is made: however soon we are killed, it does not stay behind.
        self._list("folder", folder)
        self._folders.append(folder)
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise StorageError(f"{folder} cannot be created: {error.strerror}") from error
        return folder

    def adopt_folder(self, folder: Path) -> None:
        """Remove ``folder`` when the processes have ended, or we have been killed."""
        self._list("folder", folder)
        self._folders.append(folder)

    def start(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | int | None = None,
        pass_fds: Sequence[int] = (),
        attached: bool = False,
    ) -> Child:
        """Start a process whose output goes to ``log`` (or to ``output``).

        A process that is ``attached`` has this process's own input and output.

        Raises:
            StorageError: the log cannot be written.
        """
        with open_log(log) as sink:
            process = subprocess.Popen(
                list(command),
                stdin=None if attached else subprocess.DEVNULL,
                stdout=None if attached else sink if output is None else output,
                stderr=None if attached else subprocess.STDOUT if output is None else sink,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                pass_fds=pass_fds,
            )
        return self.adopt(name, process, log)

    def adopt(self, name: str, process: Process, log: Path) -> Child:
        """Take charge of a process that leads its session and writes to ``log``."""
        child = Child(name=name, process=process, log=log)
        self._running.append(child)
        self._list("session", process.pid)
        return child

    def finished(self) -> list[Child]:
        """Return children that ended since the last call; kill processes that they left running."""
        done = [c for c in self._running if c.process.poll() is not None]
        self._running = [c for c in self._running if c not in done]
        for child in done:
            self._end_session(child)
        return done

    @property
    def running(self) -> int:
        """Number of children that are running."""
        return len(self._running)

    def all_running(self) -> tuple[Child, ...]:
        """Children that were running when last looked at."""
        return tuple(self._running)

    def end_all(self) -> None:
        """Ask every session to end, and kill what is left after :data:`GRACE_S`."""
        for child in self._running:
            _signal_session(child, signal.SIGTERM)
        # One deadline for all of them, because they end side by side.
        deadline = time.monotonic() + GRACE_S
        for child in self._running:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal_session(child, signal.SIGKILL)
                child.process.wait()
            # Kills grandchildren that ignored the request.
            self._end_session(child)
        self._running = []

    def _end_session(self, child: Child) -> None:
        _signal_session(child, signal.SIGKILL)
        # Taken off the list only now: if we are killed before, the reaper ends the session.
        self._forget("session", child.process.pid)

    def _list(self, kind: str, what: int | Path) -> None:
        if self._reaper is not None:
            self._reaper.add(kind, what)

    def _forget(self, kind: str, what: int | Path) -> None:
        if self._reaper is not None:
            self._reaper.remove(kind, what)


def end_now(code: int) -> NoReturn:
    """End this process at once, after flushing its output.

    The interpreter's own exit is left out: it would wait for threads and destroy the program's
    objects.
    """
    flush_output()
    os._exit(code)


def flush_output() -> None:
    """Flush what a program has printed, on streams of its own too.

    A stream may be closed, have no ``flush``, or lie on a full disk: none of that is a failure.
    """
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]  # None where a process has no streams


def ending(code: int) -> str:
    """How a process ended, by its exit code: ``was ended by signal 9``."""
    if code == -signal.SIGKILL:
        return f"was ended by signal {-code} (so Linux ends a process when memory is short)"
    return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"


def log_tail(path: Path, lines: int) -> str:
    """The last ``lines`` lines of a log; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MOST_TAIL_BYTES))
            text = file.read(MOST_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def open_log(path: Path) -> IO[bytes]:
    """Open a new file for a process's output.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def _signal_session(child: Child, number: signal.Signals) -> None:
    try:
        os.killpg(child.process.pid, number)
    except (ProcessLookupError, PermissionError):
        return
