"""Starts rank processes from one that has already imported what they all need.

To import torch with its distributed parts takes seconds, far longer than a small rank needs for
its first steps. The server imports them once and forks: a rank is there in some 20 ms, and pages
that no rank writes to are in memory once. A fork is an ordinary main process otherwise: a session
of its own, no ``multiprocessing`` parent, ``sys.argv`` and exit code its own.

What makes forking safe here: the server has imported but computed nothing, so none of torch's
thread pools, no autograd thread and no CUDA context exists yet (what threads there are, of OpenBLAS
and Arrow's allocator, their libraries renew after a fork). It answers one request at a time over a
socket pair and collects an exit status only when asked for it, so that a process number stays taken
for as long as its owner may signal it.

Ranks of one program import the same. A fork tells in the end which of some modules it has imported,
and the server imports them before it forks again: see ``learn``. Where the fork serves forks of its
own (a point of a sweep), what those imported is told as well.
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
"""Before the modules that are learned, among the server's arguments."""
_LOST = -signal.SIGTERM
"""Exit status of a fork whose server is gone: the kernel has asked it to end."""


class Server(Process, Protocol):
    """The server's process, for its client."""

    def kill(self) -> None:
        """End it at once."""


class ForkServer:
    """The client's side: a context whose server starts with the first fork."""

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
            log: what the server prints.
            learn: modules that forks find imported once one of them has imported them.
            environment: of the server and its forks; None: this process's.
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
        """The client of a server that runs already."""
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
        """End the server, and whoever it has started."""
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
        """The server's answer; None where it has none, or is gone."""
        if self._server is None:
            self._start_server()
        if self._socket is None:
            return None
        message = json.dumps(request).encode() + b"\n"
        try:
            socket.send_fds(self._socket, [message], descriptors)
            answer = self._socket.recv(_MESSAGE_BYTES)
        except BaseException as error:
            # Interrupted here, the next question would be given this one's answer.
            self._hang_up()
            if isinstance(error, OSError):
                return None
            raise
        # Nothing at all where the server has ended.
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
        """The server ends whoever it has started, and itself."""
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
    """A process that the server started: as much of ``subprocess.Popen`` as its owner needs."""

    def __init__(self, *, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Its exit code once it has ended, negative for a signal.

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
        """Its exit code.

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
    """What a fork is to do, once it is there."""

    module: str
    arguments: list[str]
    learn: tuple[str, ...]
    """Modules of which to tell, in the end, which are imported."""
    tell: int
    """Descriptor of a pipe for that."""


def serve(connection: socket.socket, learn: Sequence[str] = ()) -> Forked | None:
    """Fork on request until the client is gone, then end all forks that still run.

    Returns once in each fork, with what it is to do, and once in the server.
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
        # The fork has its own; these would stay open for every later fork.
        os.close(output)
        os.close(tell)
        running[pid] = hear
        _send(connection, pid)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return None


def _told(hear: int) -> dict[str, str]:
    """Modules that a fork which has ended had imported, and from where; nothing where it was
    ended."""
    # Its own children may still hold the other end.
    os.set_blocking(hear, False)
    with open(hear, "rb", buffering=0) as pipe:
        *lines, _ = (pipe.read(_MESSAGE_BYTES) or b"").split(b"\n")
    return {name: origin for line in lines for name, origin in json.loads(line).items()}


def _import_learned(learned: Mapping[str, str]) -> None:
    """Import what forks imported, if it is the same here: a program may have a module of its own
    that is called so."""
    for name in learned.keys() - sys.modules.keys():
        with contextlib.suppress(ImportError):
            if _origin(importlib.util.find_spec(name)) == learned[name]:
                importlib.import_module(name)


def _origin(spec: ModuleSpec | None) -> str:
    return (spec.origin if spec is not None else None) or ""


def _fork(connection: socket.socket, output: int) -> int:
    """0 in the fork, which has a session and ``output`` of its own; there, its process number."""
    ready, tell = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn of any thread; see above for those that are there.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(tell)
        # Nobody learns of a process that does not lead its session yet: it could not be ended.
        os.read(ready, 1)
        os.close(ready)
        return pid
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The end of ``tell`` is what the server waits for: the session is there by now.
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
    # A client that is gone shows at the next request.
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(json.dumps(answer).encode() + b"\n")


def run_module(forked: Forked) -> int:
    """What ``python -m module arguments`` does, in a fork; returns the exit code."""
    if "numpy" in sys.modules:
        # Python reseeds itself after a fork; ranks that seed nothing differ in numpy's numbers too.
        importlib.import_module("numpy").random.seed()
    program = importlib.import_module(forked.module)
    sys.argv = [str(program.__file__), *forked.arguments]
    code = int(program.main(forked.arguments))
    known = {name: sys.modules[name] for name in forked.learn if name in sys.modules}
    imported = {name: _origin(module.__spec__) for name, module in known.items()}
    # A fork that ``program`` made of itself (see :mod:`.forked_server`) comes here, too, and all of
    # its forks: of what they imported the first server learns. Whoever would hear it may be gone,
    # and of many that tell the first say the same.
    with contextlib.suppress(OSError):
        os.set_blocking(forked.tell, False)
        os.write(forked.tell, json.dumps(imported).encode() + b"\n")
    return code


def main(arguments: list[str]) -> int:
    """Entry of the server, and of every fork; returns the exit code."""
    die_with_parent()
    connection = socket.socket(fileno=int(arguments[0]))
    place = arguments.index(_LEARN)
    for module in arguments[1:place]:
        importlib.import_module(module)
    forked = serve(connection, arguments[place + 1 :])
    if forked is None:
        return 0
    code = run_module(forked)
    # The interpreter would go on to destroy what a program that was stopped in the middle holds: a
    # second or two of a large model's, for nobody.
    atexit._run_exitfuncs()
    end_now(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
