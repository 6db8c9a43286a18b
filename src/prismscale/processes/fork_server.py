"""Starts rank processes from one that has already imported what they all need.

Importing torch with its distributed parts takes seconds, far longer than a small rank needs for
its first steps. The server imports them once and forks: a rank is there in some 20 ms, and pages
that no rank writes to are in memory once. Otherwise a fork is an ordinary main process: it has its
own session, ``sys.argv`` and exit code, and no ``multiprocessing`` parent.

Forking is safe here because the server has imported but computed nothing: none of torch's thread
pools, no autograd thread and no CUDA context exists yet (OpenBLAS and Arrow's allocator have
threads, which these libraries renew after a fork). The server answers one request at a time over a
socket pair. It collects an exit status only when asked for it, so that a process id stays taken for
as long as its owner may signal it.

Ranks of one program import the same modules. At its end, a fork reports which modules of a given
list it has imported, and the server imports them before it forks again: see ``learn``. If the fork
serves forks of its own (a point of a sweep), the modules that those imported are reported as well.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from prismscale.errors import PrismscaleError
from prismscale.processes.children import (
    Child,
    Children,
    Process,
    Program,
    die_with_parent,
    end_now,
    ending,
    log_tail,
    open_log,
)
from prismscale.processes.starter import cores

_GRACE_S = 3.0
_POLL_S = 0.005
_MESSAGE_BYTES = 1 << 16
_LEARN = "--learn"
"""The server's argument that stands before the modules to be learned."""
_LOST = -signal.SIGTERM
"""Exit status of a fork whose server is gone: the kernel has asked it to end."""


class Server(Process, Protocol):
    """The server's process, as its client sees it."""

    def kill(self) -> None:
        """End it at once."""


class ForkServer:
    """The client of a fork server: a context whose server starts with the first fork."""

    def __init__(
        self,
        *,
        preload: Sequence[str],
        log: Path,
        learn: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            preload: modules that every fork finds imported.
            log: file of the server's output.
            learn: modules that forks find imported once one of them has imported them.
            environment: variables of the server and its forks; None: those of this process.
        """
        self._preload = tuple(preload)
        self._learn = tuple(learn)
        self._log = log
        self._environment = environment
        self._server: Server | None = None
        self._socket: socket.socket | None = None
        self._loss_told = False

    @classmethod
    def connected(cls, server: Server, connection: socket.socket, log: Path) -> ForkServer:
        """Make the client of a server that is already running."""
        client = cls(preload=(), log=log)
        client._server, client._socket = server, connection
        return client

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server and all processes that it has started."""
        self._hang_up()
        if self._server is not None:
            try:
                self._server.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()

    @property
    def slots(self) -> int:
        """See :class:`prismscale.processes.starter.Starter`."""
        return cores()

    def has_room(self) -> bool:
        """See :class:`prismscale.processes.starter.Starter`."""
        return True

    def start(self, children: Children, program: Program) -> Child:
        """Start ``program`` as a fork; see :class:`prismscale.processes.starter.Starter`.

        Raises:
            PrismscaleError: the server could not be started, or has ended.
            StorageError: the log cannot be written.
        """
        with open_log(program.log) as sink:
            request = {"fork": program.module, "arguments": program.arguments}
            pid = self.ask(request, descriptors=[sink.fileno()])
        if pid is None:
            raise self._loss("has ended")
        return children.adopt(program.name, Fork(pid=pid, server=self), program.log)

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> int | None:
        """Send a request; return the server's answer, or None if it has none or is gone."""
        if self._server is None:
            self._start_server()
        if self._socket is None:
            return None
        message = json.dumps(request).encode() + b"\n"
        try:
            socket.send_fds(self._socket, [message], descriptors)
            answer = self._socket.recv(_MESSAGE_BYTES)
        except BaseException as error:
            # After an interruption here, the next request would be given this one's answer.
            self._hang_up()
            if isinstance(error, OSError):
                return None
            raise
        # Empty if the server has ended.
        value = json.loads(answer or b"null")
        return None if value is None else int(value)

    def is_gone(self) -> bool:
        """Whether the server has ended, or nobody can ask it any more."""
        return self._socket is None or self._server is None or self._server.poll() is not None

    def raise_if_lost(self) -> None:
        """Raise once if the server ended unexpectedly: its forks ended with it.

        Raises:
            PrismscaleError: the server ended, and not because it was told to.
        """
        if self._server is None or self._loss_told:
            return
        self._loss_told = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._server.wait(_GRACE_S)
            if code != 0:
                raise self._loss(ending(code))

    def _loss(self, how: str) -> PrismscaleError:
        return PrismscaleError(
            f"the process that starts ranks {how}, and with it the ranks; the end of its output "
            f"({self._log}):\n{log_tail(self._log, 30)}"
        )

    def _hang_up(self) -> None:
        """Close the connection: the server then ends all its forks and itself."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _start_server(self) -> None:
        with open_log(self._log) as sink:
            self._socket, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, "-m", __name__, str(theirs.fileno())]
                self._server = subprocess.Popen(
                    [*command, *self._preload, _LEARN, *self._learn],
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    env=None if self._environment is None else dict(self._environment),
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                )


class Fork:
    """A process that the server started: the part of ``subprocess.Popen`` that its owner needs."""

    def __init__(self, *, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """The fork's exit code once it has ended, negative for a signal; None before.

        Raises:
            PrismscaleError: see :meth:`ForkServer.raise_if_lost`.
        """
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})
        if self.returncode is None and self._server.is_gone():
            self.returncode = _LOST
            self._server.raise_if_lost()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the fork has ended; return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended within ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(["fork", str(self.pid)], timeout or 0.0)
            time.sleep(_POLL_S)
        return code


class Forked(NamedTuple):
    """The task of a new fork."""

    module: str
    arguments: list[str]
    learn: tuple[str, ...]
    """At its end, the fork reports which of these modules it has imported."""
    tell: int
    """Descriptor of the pipe for that report."""


def serve(connection: socket.socket, learn: Sequence[str] = ()) -> Forked | None:
    """Fork on request until the client is gone, then end all forks that still run.

    Returns once in each fork, with its task, and once in the server, with None.
    """
    running: dict[int, int] = {}
    learned: dict[str, str] = {}
    while (received := _receive(connection)) is not None:
        request, output = received
        if output is None:
            pid = int(request["poll"])
            status = _status(pid)
            if status is not None and pid in running:
                learned.update(_told(running.pop(pid)))
            _send(connection, status)
            continue
        _import_learned(learned)
        hear, tell = os.pipe()
        pid = _fork(connection, output)
        if pid == 0:
            for descriptor in (hear, *running.values()):
                os.close(descriptor)
            return Forked(
                module=str(request["fork"]),
                arguments=list(request["arguments"]),
                learn=tuple(learn),
                tell=tell,
            )
        # The fork has its own copies. Every later fork would inherit these.
        os.close(output)
        os.close(tell)
        running[pid] = hear
        _send(connection, pid)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def _told(hear: int) -> dict[str, str]:
    """Modules that an ended fork had imported, with their files; empty if the fork was killed."""
    # Must not block: children of the fork may still hold the other end.
    os.set_blocking(hear, False)
    with open(hear, "rb", buffering=0) as pipe:
        *lines, _ = (pipe.read(_MESSAGE_BYTES) or b"").split(b"\n")
    return {name: origin for line in lines for name, origin in json.loads(line).items()}


def _import_learned(learned: Mapping[str, str]) -> None:
    """Import the modules that forks imported, if they come from the same files here.

    A program may have a module of its own with the same name.
    """
    for name in learned.keys() - sys.modules.keys():
        with contextlib.suppress(ImportError):
            if _origin(importlib.util.find_spec(name)) == learned[name]:
                importlib.import_module(name)


def _origin(spec: ModuleSpec | None) -> str:
    return (spec.origin if spec is not None else None) or ""


def _fork(connection: socket.socket, output: int) -> int:
    """Fork into a new session with its own ``output``; return 0 there, and its id in the server."""
    ready, tell = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn of any thread; the module's docstring says which threads there are.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(tell)
        # Wait until the fork leads its session: before, its owner could not end it.
        os.read(ready, 1)
        os.close(ready)
        return pid
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The server waits until ``tell`` is closed: the session is there by now.
    for descriptor in (output, ready, tell):
        os.close(descriptor)
    connection.close()
    return 0


def _status(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _receive(connection: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    try:
        text, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
    except ConnectionResetError:
        return None
    while text and not text.endswith(b"\n"):
        text += connection.recv(_MESSAGE_BYTES)
    return (json.loads(text), descriptors[0] if descriptors else None) if text else None


def _send(connection: socket.socket, answer: int | None) -> None:
    # If the client is gone, the next request shows it.
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(json.dumps(answer).encode() + b"\n")


def run_module(forked: Forked) -> int:
    """Do in a fork what ``python -m module arguments`` does; return the exit code."""
    if "numpy" in sys.modules:
        # Python reseeds itself after a fork, but numpy does not. Ranks that seed nothing must
        # differ in numpy's random numbers too.
        importlib.import_module("numpy").random.seed()
    program = importlib.import_module(forked.module)
    sys.argv = [str(program.__file__), *forked.arguments]
    code = int(program.main(forked.arguments))
    known = {name: sys.modules[name] for name in forked.learn if name in sys.modules}
    imported = {name: _origin(module.__spec__) for name, module in known.items()}
    # A fork that ``program`` made of itself (see :mod:`.forked_server`) comes here too, and so do
    # all its forks: the first server learns what they imported. A write may fail because the reader
    # is gone or the pipe is full. A full pipe does not matter: earlier forks reported the same.
    with contextlib.suppress(OSError):
        os.set_blocking(forked.tell, False)
        os.write(forked.tell, json.dumps(imported).encode() + b"\n")
    return code


def main(arguments: list[str]) -> int:
    """Entry of the server and of every fork; returns the exit code."""
    die_with_parent()
    connection = socket.socket(fileno=int(arguments[0]))
    place = arguments.index(_LEARN)
    for module in arguments[1:place]:
        importlib.import_module(module)
    forked = serve(connection, arguments[place + 1 :])
    if forked is None:
        return 0
    code = run_module(forked)
    # The interpreter would go on to destroy the objects of a program that was stopped in the
    # middle. For a large model that takes a second or two, and nobody needs it.
    atexit._run_exitfuncs()
    end_now(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
