"""A fork server that is itself a fork of a process that has imported everything already.

Such a process splits in two before it computes anything. One half goes on, and the other half
serves it with forks, in which everything is imported already. See :mod:`.fork_server` for why forks
of a process that has computed nothing are safe.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prismscale.processes.children import die_with_parent, open_log
from prismscale.processes.fork_server import ForkServer, run_module, serve

_POLL_S = 0.005


@dataclass
class OwnFork:
    """A fork of this process: the part of ``subprocess.Popen`` that its client needs."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """The fork's exit code once it has ended, negative for a signal; None before."""
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
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

    def kill(self) -> None:
        """End it at once."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def split(log: Path, *, learn: Sequence[str] = ()) -> ForkServer | int:
    """Split this process, which has computed nothing yet, into a client and a server of forks.

    Returns the client in the half that goes on. In the other half and in each of its forks, it
    returns an exit code when that process has done its work: the caller exits with it.

    Args:
        log: file of the server's output.
        learn: modules that forks find imported once one of them has imported them.

    Raises:
        StorageError: the log cannot be written.
    """
    ours, theirs = socket.socketpair()
    with open_log(log) as sink:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Newer Pythons warn of any thread; .fork_server says which threads there are.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            theirs.close()
            return ForkServer.connected(OwnFork(pid), ours, log)
        ours.close()
        os.setsid()
        die_with_parent()
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    forked = serve(theirs, learn)
    return 0 if forked is None else run_module(forked)
